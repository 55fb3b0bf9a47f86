"""Products a b with few rows, and few columns of a b^T: limited by reading one operand once."""

import numpy as np

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    broadcast,
    element,
    fma,
    lane_sum,
    load,
    load_first,
    prefetch,
    store,
    store_first,
)
from smallmind.kernels.gemm.packing import Region
from smallmind.kernels.gemm.tile import Rows

MAX_FEW_ROWS = 4  # up to this many rows a tile would leave most of its registers idle
# Elements of K summed one after the other: the sums of blocks are added, so that the error does not
# grow with all of K.
BLOCK_DEPTH = 8192
PREFETCH_ROWS = 16  # rows of b: parts of rows are too short for the CPU to fetch the next by itself
CHUNK_COLUMNS = 2048  # of b that `add_rows` reads at a time: four rows of them stay in cache


@jit
def add_columns(sums, a, b, region):
    """Adds a few columns of a b^T to sums, in float32: Rows, from the region's corner on."""
    K = b.shape[1]
    for j in range(region.left, region.right):
        start = at(sums.start, j - region.left)
        _add_dots(start, sums.stride, b, j * K, a, region.first, region.last)


@jit
def _add_dots(sums, step, x, x_place, y, first, last):
    """Adds x[x_place:] . y[first + n] to sums[step n], for the rows first..last of y."""
    K, count = y.shape[1], last - first
    fours = count // 4 * 4
    for start in range(0, K, BLOCK_DEPTH):
        depth = min(BLOCK_DEPTH, K - start)
        for n in range(0, fours, 4):
            y_place = (first + n) * K + start
            _add_four_dots(at(sums, step * n), step, x, x_place + start, y, y_place, depth)
        for n in range(fours, count):
            total = _dot(x, x_place + start, y, (first + n) * K + start, depth)
            sums[step * n] += total


@jit
def _add_four_dots(sums, step, x, x_place, y, y_place, count):
    """Adds the products of `count` elements of x with those of four rows of y to sums."""
    K = y.shape[1]
    whole, tail = count - count % LANES, count % LANES
    s0 = s1 = s2 = s3 = broadcast(np.float32(0))
    for k in range(0, whole, LANES):
        u, v = load(x, x_place + k), y_place + k
        s0, s1 = fma(u, load(y, v), s0), fma(u, load(y, v + K), s1)
        s2, s3 = fma(u, load(y, v + 2 * K), s2), fma(u, load(y, v + 3 * K), s3)
    if tail:
        u, v = load_first(x, x_place + whole, tail), y_place + whole
        s0 = fma(u, load_first(y, v, tail), s0)
        s1 = fma(u, load_first(y, v + K, tail), s1)
        s2 = fma(u, load_first(y, v + 2 * K, tail), s2)
        s3 = fma(u, load_first(y, v + 3 * K, tail), s3)
    sums[0] += lane_sum(s0)
    sums[step] += lane_sum(s1)
    sums[2 * step] += lane_sum(s2)
    sums[3 * step] += lane_sum(s3)


@jit
def _dot(x, x_place, y, y_place, count):
    """Returns the dot product of `count` elements of x and y."""
    whole, tail = count - count % LANES, count % LANES
    total = broadcast(np.float32(0))
    for k in range(0, whole, LANES):
        total = fma(load(x, x_place + k), load(y, y_place + k), total)
    if tail:
        u = load_first(x, x_place + whole, tail)
        total = fma(u, load_first(y, y_place + whole, tail), total)
    return lane_sum(total)


@jit
def add_rows(sums, a, b, region):
    """Adds a region of a b, of few rows, to sums, in float32: Rows, from the region's corner on.

    a and b may be of 16-bit numbers. The bits of a row do not depend on other rows.
    """
    first, last, left, right = region
    K = b.shape[0]
    a = a.reshape(-1)  # a^T b of one row reads the same elements
    if K <= BLOCK_DEPTH:
        for begin in range(left, right, CHUNK_COLUMNS):
            part = Region(first, last, begin, min(right, begin + CHUNK_COLUMNS))
            _add_block(Rows(at(sums.start, begin - left), sums.stride), a, b, part)
        return
    for i in range(first, last):
        for j in range(left, right, LANES):
            count, place = min(LANES, right - j), (i - first) * sums.stride + j - left
            for start in range(0, K, BLOCK_DEPTH):
                stop = min(K, start + BLOCK_DEPTH)
                total = load_first(sums.start, place, count)
                total = total + _column_dots(a, i * K, b, j, count, start, stop)
                store_first(sums.start, place, total, count)


@jit
def _column_dots(a, place, b, j, count, start, stop):
    """Returns the products of a[place:] and the columns j..j + count of b, rows start..stop."""
    N = b.shape[1]
    total = broadcast(np.float32(0))
    for k in range(start, stop):
        total = fma(broadcast(element(a, place + k)), load_first(b, k * N + j, count), total)
    return total


@jit
def _add_block(sums, a, b, region):
    """Adds a[i] . b[:, j] to sums[i, j] for a region, with flat a, four rows of b at a time."""
    first, last, left, right = region
    K, N = b.shape
    columns = right - left
    whole = columns // LANES * LANES
    fours = K // 4 * 4
    for k in range(0, fours, 4):
        for i in range(first, last):
            x, row = i * K + k, at(sums.start, (i - first) * sums.stride)
            a0, a1 = broadcast(element(a, x)), broadcast(element(a, x + 1))
            a2, a3 = broadcast(element(a, x + 2)), broadcast(element(a, x + 3))
            for j in range(0, whole, LANES):
                y = k * N + left + j
                for row_ahead in range(PREFETCH_ROWS, PREFETCH_ROWS + 4):
                    prefetch(b, y + row_ahead * N)
                s, t = fma(a0, load(b, y), load(row, j)), a1 * load(b, y + N)
                s, t = fma(a2, load(b, y + 2 * N), s), fma(a3, load(b, y + 3 * N), t)
                store(row, j, s + t)
    for k in range(fours, K):
        for i in range(first, last):
            a0, row = broadcast(element(a, i * K + k)), at(sums.start, (i - first) * sums.stride)
            for j in range(0, whole, LANES):
                store(row, j, fma(a0, load(b, k * N + left + j), load(row, j)))
    if whole < columns:
        n = columns - whole
        for i in range(first, last):
            row = at(sums.start, (i - first) * sums.stride)
            total = load_first(row, whole, n)
            for k in range(K):
                a0 = broadcast(element(a, i * K + k))
                total = fma(a0, load_first(b, k * N + left + whole, n), total)
            store_first(row, whole, total, n)
