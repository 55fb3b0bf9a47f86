"""Dropout (Srivastava et al. 2014) whose mask is computed from a counter, never stored.

An element's fate is a hash of a key and of its flat position. The backward pass computes the same
mask again from the same key; so does a resumed run, at any number of threads.
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.simd import (
    LANES,
    dropout_factors,
    load,
    load_first,
    store,
    store_first,
)
from smallmind.kernels.codegen.threads import threads


class Mask(NamedTuple):
    """A dropout mask: an element is dropped where its hash with the key is below the threshold."""

    key: int  # 64 bits
    threshold: int
    factor: float  # of what is kept


_NO_MATRIX = np.empty((0, 0), np.float32)


def dropout_threshold(probability):
    """The number below which a 32-bit hash means `dropped`, and 1 / (1 - probability)."""
    return int(probability * 2**32), np.float32(1 / (1 - probability))


def dropout(out, x, key, probability, addend=None):
    """x (R, C) -> out (R, C) = x mask / (1 - probability) [+ addend (R, C)]. Writes out.

    The mask follows from key, 64 bits. It is its own backward: dx = dropout(dy) with the same key.
    """
    threshold, scale = dropout_threshold(probability)
    addend = _NO_MATRIX if addend is None else addend
    _dropout(out, x, np.uint64(key), threshold, scale, addend, threads())


@parallel_jit
def _dropout(out, x, key, threshold, scale, addend, workers):
    for worker in prange(workers):
        _dropout_part(out, x, key, threshold, scale, addend, np.int64(worker), workers)


@jit
def _dropout_part(out, x, key, threshold, scale, addend, worker, workers):
    vectors = x.size // LANES
    for i in range(vectors * worker // workers, vectors * (worker + 1) // workers):
        place = i * LANES
        y = load(x, place) * dropout_factors(key, place, threshold, scale)
        if addend.size > 0:
            y = y + load(addend, place)
        store(out, place, y)
    tail = x.size % LANES
    if tail and worker == workers - 1:
        place = vectors * LANES
        y = load_first(x, place, tail) * dropout_factors(key, place, threshold, scale)
        if addend.size > 0:
            y = y + load_first(addend, place, tail)
        store_first(out, place, y, tail)
