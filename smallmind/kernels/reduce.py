"""Sums over rows and over vectors, in chunks that do not depend on the number of threads."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit, serial_jit
from smallmind.kernels.codegen.rounding import ceil_div
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    add_squares,
    broadcast,
    load,
    load_first,
    load_up_to,
    no_doubles,
    store,
    store_first,
    store_up_to,
    sum_of_doubles,
)

CHUNK_ROWS = 64  # rows per partial sum
CHUNK_ELEMENTS = 8192  # elements per partial sum of squares
MAX_ALONE_ELEMENTS = 16384  # elements up to which one thread sums columns faster than several


def column_sum(out, x):
    R, C = x.shape
    if x.size <= MAX_ALONE_ELEMENTS:
        _column_sums_alone(out, x)
    else:
        _column_sums(out, scratch(ceil_div(R, CHUNK_ROWS), C), x)


@serial_jit
def _column_sums_alone(out, x):
    """Adds with the sums in registers: one vector of columns after another."""
    R, C = x.shape
    for c in range(0, C, LANES):
        count = min(LANES, C - c)
        total = load_up_to(out, c, count)
        for first in range(0, R, CHUNK_ROWS):
            chunk = broadcast(np.float32(0))
            for r in range(first, min(R, first + CHUNK_ROWS)):
                chunk = chunk + load_up_to(x, r * C + c, count)
            total = total + chunk
        store_up_to(out, c, total, count)


@parallel_jit
def _column_sums(out, partial, x):
    for chunk in prange(partial.shape[0]):
        _column_sums_chunk(partial, x, np.int64(chunk))
    add_chunks(out, partial, 0)


@jit
def _column_sums_chunk(partial, x, chunk):
    R, C = x.shape
    partial[chunk, :C] = np.float32(0)
    target, tail = chunk * partial.shape[1], C % LANES
    for r in range(chunk * CHUNK_ROWS, min(R, chunk * CHUNK_ROWS + CHUNK_ROWS)):
        for c in range(0, C - tail, LANES):
            store(partial, target + c, load(partial, target + c) + load(x, r * C + c))
        if tail:
            c = C - tail
            total = load_first(partial, target + c, tail) + load_first(x, r * C + c, tail)
            store_first(partial, target + c, total, tail)


@serial_jit
def add_column_sums(out, partial, column):
    """partial (P, W) -> out (C,) += the sums of columns column..column + C. Adds to out."""
    add_chunks(out, partial, column)


@jit
def add_chunks(out, partial, column):
    """Adds as `add_column_sums` does, for kernels, which need no second call from Python."""
    W, C = partial.shape[1], out.size
    for c in range(0, C, LANES):
        count = min(LANES, C - c)
        total = load_up_to(out, c, count)
        for chunk in range(partial.shape[0]):
            total = total + load_up_to(partial, chunk * W + column + c, count)
        store_up_to(out, c, total, count)


def sum_of_squares(x):
    chunks = ceil_div(x.size, CHUNK_ELEMENTS)
    partial = scratch(1, 2 * chunks).reshape(-1).view(np.float64)[:chunks]
    if chunks == 1:
        _sum_of_squares_alone(partial, x)
        return float(partial[0])
    _sums_of_squares(partial, x)
    return float(partial.sum())


@serial_jit
def _sum_of_squares_alone(partial, x):
    partial[0] = _sum_of_squares_chunk(x, np.int64(0))


@parallel_jit
def _sums_of_squares(partial, x):
    for chunk in prange(partial.size):
        partial[chunk] = _sum_of_squares_chunk(x, np.int64(chunk) * CHUNK_ELEMENTS)


@jit
def _sum_of_squares_chunk(x, first):
    last = min(x.size, first + CHUNK_ELEMENTS)
    # In float64: in float32 the squares overflow above 1.8e19, and vanish below 1e-23.
    a, b = no_doubles(), no_doubles()
    i = first
    while i + 2 * LANES <= last:
        a, b = add_squares(a, load(x, i)), add_squares(b, load(x, i + LANES))
        i += 2 * LANES
    while i < last:
        a = add_squares(a, load_first(x, i, min(LANES, last - i)))
        i += LANES
    return sum_of_doubles(a, b)
