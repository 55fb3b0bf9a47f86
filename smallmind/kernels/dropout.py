"""Dropout (Srivastava et al. 2014) with a mask that is computed from a counter, never stored.

A hash of a key and of its place in the whole batch decides whether an element is dropped. The
backward pass recomputes the mask from the same key; so does a resumed run, on any number of threads
and in micro-batches of any size.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.scratch import absent
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    dropout_factors,
    load_up_to,
    share,
    store_up_to,
)


class Drops(NamedTuple):
    """The dropout of a pass. Recorded passes read the numbers that change in their arrays again."""

    key: np.ndarray  # uint64 ()
    first_row: np.ndarray  # int64 (), the place of this pass in its batch
    threshold: int
    factor: np.float32


class Mask(NamedTuple):
    """A dropout mask: an element is dropped where its hash with the key is below the threshold."""

    key: np.uint64
    threshold: int
    factor: np.float32  # of the elements that are kept


def drops(key, probability, first_row):
    """key (), first_row () -> Drops, whose threshold is that of a 32-bit hash."""
    key, first_row = np.asarray(key, np.uint64), np.asarray(first_row, np.int64)
    return Drops(key, first_row, int(probability * 2**32), np.float32(1 / (1 - probability)))


@jit
def mask_of_head(mask, head):
    """-> the mask of one head's probabilities. head counts all heads of the sequences in the batch.

    Its key is `randomness.hash_words(head, key)`.
    """
    x = np.uint64(head) * np.uint64(0x9E3779B97F4A7C15) + mask.key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return Mask(x ^ (x >> np.uint64(31)), mask.threshold, mask.factor)


def dropout(out, x, key, probability, addend=None, first_row=0):
    addend = absent(out.dtype, 2) if addend is None else addend
    _dropout(out, x, drops(key, probability, first_row), addend)


@parallel_jit
def _dropout(out, x, drops, addend, workers):
    # Parallel loops cannot read arrays ().
    mask = Mask(drops.key[()], drops.threshold, drops.factor)
    first_in_batch = drops.first_row[()] * x.shape[1]
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        pointers = at(out, 0), at(x, 0), at(addend, 0)
        operands = DropoutOperands(*pointers, addend.size > 0, first_in_batch)
        _dropout_part(operands, mask, first, last)


class DropoutOperands(NamedTuple):
    """Pointers to the arrays, whether there is an addend, and the place of x in its batch."""

    out: Any
    x: Any
    addend: Any
    adds: bool
    first_in_batch: int


@jit
def _dropout_part(operands, mask, first, last):
    whole = last - last % LANES
    for place in range(first, whole, LANES):
        _dropout_vector(operands, mask, place, LANES)
    if whole < last:
        _dropout_vector(operands, mask, whole, last - whole)


@inline_jit
def _dropout_vector(operands, mask, place, count):
    counter = operands.first_in_batch + place
    factors = dropout_factors(mask.key, counter, 1, mask.threshold, mask.factor)
    y = load_up_to(operands.x, place, count) * factors
    if operands.adds:
        y = y + load_up_to(operands.addend, place, count)
    store_up_to(operands.out, place, y, count)
