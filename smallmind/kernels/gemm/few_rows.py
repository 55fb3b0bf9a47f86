"""Products with few rows, or few columns: limited by reading the larger operand once."""

import numpy as np

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    fma,
    lane_sum,
    load,
    load_first,
    store,
    store_first,
)
from smallmind.kernels.gemm.packing import TRANSPOSE_B, Region

FEW = 4  # up to this many rows a tile would leave most of its registers idle
# Elements of K summed one after the other: the sums of blocks are added, so that the error does not
# grow with all of K.
BLOCK = 8192
CHUNK = 2048  # columns of b that `_add_rows` reads at a time: four rows of them stay in cache


@jit
def multiply_few(out, a, b, bias, addend, variant, region):
    """Writes a region of out = a b, in one of its variants [+ bias] [+ addend]."""
    first, last, left, right = region
    for i in range(first, last):
        for j in range(left, right):
            start = np.float32(0)
            if addend.size > 0:
                start += addend[i, j]
            if bias.size > 0:
                start += bias[j]
            out[i, j] = start
    if variant != TRANSPOSE_B:
        _add_rows(out, a, b, region)
        return
    N, K = b.shape
    flat = out.reshape(-1)
    if last - first <= right - left:
        for i in range(first, last):
            _add_dots(flat, i * N, 1, a, i * K, b, left, right)
    else:
        for j in range(left, right):
            _add_dots(flat, j, N, b, j * K, a, first, last)


@jit
def _add_dots(out, place, step, x, x_place, y, first, last):
    """out[place + step j] += x[x_place:] . y[j] for the rows first..last of y, four at a time."""
    K = y.shape[1]
    fours = first + (last - first) // 4 * 4
    for start in range(0, K, BLOCK):
        count = min(BLOCK, K - start)
        for j in range(first, fours, 4):
            _add_four_dots(out, place + step * j, step, x, x_place + start, y, j * K + start, count)
        for j in range(fours, last):
            total = _dot(x, x_place + start, y, j * K + start, count)
            out[place + step * j] += total


@jit
def _add_four_dots(out, place, step, x, x_place, y, y_place, count):
    """Adds the products of `count` elements of x with those of four rows of y to out."""
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
    out[place] += lane_sum(s0)
    out[place + step] += lane_sum(s1)
    out[place + 2 * step] += lane_sum(s2)
    out[place + 3 * step] += lane_sum(s3)


@jit
def _dot(x, x_place, y, y_place, count):
    """The dot product of `count` elements of x and y."""
    whole, tail = count - count % LANES, count % LANES
    total = broadcast(np.float32(0))
    for k in range(0, whole, LANES):
        total = fma(load(x, x_place + k), load(y, y_place + k), total)
    if tail:
        u = load_first(x, x_place + whole, tail)
        total = fma(u, load_first(y, y_place + whole, tail), total)
    return lane_sum(total)


@jit
def _add_rows(out, a, b, region):
    """out[i, j] += a[i] . b[:, j] in a region of out, four rows of b at a time."""
    first, last, left, right = region
    K, N = b.shape
    a, flat = a.reshape(-1), out.reshape(-1)  # a^T b of one row reads the same elements
    if K <= BLOCK:
        for begin in range(left, right, CHUNK):
            part = Region(first, last, begin, min(right, begin + CHUNK))
            _add_block(flat, first * N + begin, N, a, b, 0, K, part)
        return
    sums = np.empty((last - first) * CHUNK, np.float32)
    for begin in range(left, right, CHUNK):
        end = min(right, begin + CHUNK)
        part = Region(first, last, begin, end)
        for start in range(0, K, BLOCK):
            sums[:] = np.float32(0)
            _add_block(sums, 0, CHUNK, a, b, start, min(K, start + BLOCK), part)
            for i in range(first, last):
                for j in range(begin, end):
                    flat[i * N + j] += sums[(i - first) * CHUNK + j - begin]


@jit
def _add_block(sums, place, row, a, b, start, stop, region):
    """Adds a[i, start:stop] . b[start:stop, j] for a region to sums, whose rows begin at place."""
    first, last, left, right = region
    K, N = b.shape
    columns = right - left
    whole = columns // LANES * LANES
    fours = start + (stop - start) // 4 * 4
    for k in range(start, fours, 4):
        for i in range(first, last):
            x, target = i * K + k, place + (i - first) * row
            a0, a1 = broadcast(a[x]), broadcast(a[x + 1])
            a2, a3 = broadcast(a[x + 2]), broadcast(a[x + 3])
            for j in range(0, whole, LANES):
                y, z = k * N + left + j, target + j
                s, t = fma(a0, load(b, y), load(sums, z)), a1 * load(b, y + N)
                s, t = fma(a2, load(b, y + 2 * N), s), fma(a3, load(b, y + 3 * N), t)
                store(sums, z, s + t)
    for k in range(fours, stop):
        for i in range(first, last):
            a0, target = broadcast(a[i * K + k]), place + (i - first) * row
            for j in range(0, whole, LANES):
                total = fma(a0, load(b, k * N + left + j), load(sums, target + j))
                store(sums, target + j, total)
    if whole < columns:
        n = columns - whole
        for i in range(first, last):
            target = place + (i - first) * row + whole
            total = load_first(sums, target, n)
            for k in range(start, stop):
                a0 = broadcast(a[i * K + k])
                total = fma(a0, load_first(b, k * N + left + whole, n), total)
            store_first(sums, target, total, n)
