"""Sums and copies of whole vectors in 16 or 32 bits, and zeros in their place."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.simd import LANES, broadcast, load_up_to, share, store_up_to
from smallmind.kernels.codegen.threads import threads


def add_vectors(out, x, y):
    """x, y (n,) -> out (n,) = x + y in float32, rounded to the dtype of out. out may be x or y."""
    _add_vectors(out, x, y, threads())


@parallel_jit
def _add_vectors(out, x, y, workers):
    for worker in prange(workers):
        first, last = share(out.size, np.int64(worker), workers)
        _add_part(out, x, y, first, last)


@jit
def _add_part(out, x, y, first, last):
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        store_up_to(out, i, load_up_to(x, i, count) + load_up_to(y, i, count), count)


def copy_vector(out, x):
    """x (n,) -> out (n,), rounded to the dtype of out."""
    _copy_vector(out, x, threads())


@parallel_jit
def _copy_vector(out, x, workers):
    for worker in prange(workers):
        first, last = share(out.size, np.int64(worker), workers)
        _copy_part(out, x, first, last)


@jit
def _copy_part(out, x, first, last):
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        store_up_to(out, i, load_up_to(x, i, count), count)


def clear(out):
    """out of any shape -> zeros."""
    _clear(out.reshape(-1), threads())


@parallel_jit
def _clear(out, workers):
    for worker in prange(workers):
        first, last = share(out.size, np.int64(worker), workers)
        _clear_part(out, first, last)


@jit
def _clear_part(out, first, last):
    for i in range(first, last, LANES):
        store_up_to(out, i, broadcast(np.float32(0)), min(LANES, last - i))
