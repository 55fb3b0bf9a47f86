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
            _add_block(flat, a, b, part)
        return
    for i in range(first, last):
        for j in range(left, right, LANES):
            count = min(LANES, right - j)
            for start in range(0, K, BLOCK):
                stop = min(K, start + BLOCK)
                total = load_first(flat, i * N + j, count)
                total = total + _column_dots(a, i * K, b, j, count, start, stop)
                store_first(flat, i * N + j, total, count)


@jit
def _column_dots(a, place, b, j, count, start, stop):
    """The products of a[place:] and the columns j..j + count of b, rows start..stop."""
    N = b.shape[1]
    total = broadcast(np.float32(0))
    for k in range(start, stop):
        total = fma(broadcast(a[place + k]), load_first(b, k * N + j, count), total)
    return total


@jit
def _add_block(out, a, b, region):
    """out[i, j] += a[i] . b[:, j] for a region, with flat out and a, four rows of b at a time."""
    first, last, left, right = region
    K, N = b.shape
    columns = right - left
    whole = columns // LANES * LANES
    fours = K // 4 * 4
    for k in range(0, fours, 4):
        for i in range(first, last):
            x, target = i * K + k, i * N + left
            a0, a1 = broadcast(a[x]), broadcast(a[x + 1])
            a2, a3 = broadcast(a[x + 2]), broadcast(a[x + 3])
            for j in range(0, whole, LANES):
                y, z = k * N + left + j, target + j
                s, t = fma(a0, load(b, y), load(out, z)), a1 * load(b, y + N)
                s, t = fma(a2, load(b, y + 2 * N), s), fma(a3, load(b, y + 3 * N), t)
                store(out, z, s + t)
    for k in range(fours, K):
        for i in range(first, last):
            a0, target = broadcast(a[i * K + k]), i * N + left
            for j in range(0, whole, LANES):
                total = fma(a0, load(b, k * N + left + j), load(out, target + j))
                store(out, target + j, total)
    if whole < columns:
        n = columns - whole
        for i in range(first, last):
            target = i * N + left + whole
            total = load_first(out, target, n)
            for k in range(K):
                a0 = broadcast(a[i * K + k])
                total = fma(a0, load_first(b, k * N + left + whole, n), total)
            store_first(out, target, total, n)
