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
from smallmind.kernels.gemm.packing import TRANSPOSE_B

FEW = 4  # up to this many rows a tile would leave most of its registers idle
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
    whole, tail = K - K % LANES, K % LANES
    fours = first + (last - first) // 4 * 4
    for j in range(first, fours, 4):
        s0 = s1 = s2 = s3 = broadcast(np.float32(0))
        for k in range(0, whole, LANES):
            u, v = load(x, x_place + k), j * K + k
            s0, s1 = fma(u, load(y, v), s0), fma(u, load(y, v + K), s1)
            s2, s3 = fma(u, load(y, v + 2 * K), s2), fma(u, load(y, v + 3 * K), s3)
        if tail:
            u, v = load_first(x, x_place + whole, tail), j * K + whole
            s0 = fma(u, load_first(y, v, tail), s0)
            s1 = fma(u, load_first(y, v + K, tail), s1)
            s2 = fma(u, load_first(y, v + 2 * K, tail), s2)
            s3 = fma(u, load_first(y, v + 3 * K, tail), s3)
        out[place + step * j] += lane_sum(s0)
        out[place + step * (j + 1)] += lane_sum(s1)
        out[place + step * (j + 2)] += lane_sum(s2)
        out[place + step * (j + 3)] += lane_sum(s3)
    for j in range(fours, last):
        total = broadcast(np.float32(0))
        for k in range(0, whole, LANES):
            total = fma(load(x, x_place + k), load(y, j * K + k), total)
        if tail:
            u = load_first(x, x_place + whole, tail)
            total = fma(u, load_first(y, j * K + whole, tail), total)
        out[place + step * j] += lane_sum(total)


@jit
def _add_rows(out, a, b, region):
    """out[i, j] += a[i] . b[:, j] in a region of out, four rows of b at a time."""
    first, last, left, right = region
    K, N = b.shape
    a = a.reshape(-1)  # a^T b of one row reads the same elements
    for begin in range(left, right, CHUNK):
        end = min(right, begin + CHUNK)
        whole = begin + (end - begin) // LANES * LANES
        for k in range(0, K - K % 4, 4):
            for i in range(first, last):
                x = i * K + k
                a0, a1 = broadcast(a[x]), broadcast(a[x + 1])
                a2, a3 = broadcast(a[x + 2]), broadcast(a[x + 3])
                for j in range(begin, whole, LANES):
                    y, z = k * N + j, i * N + j
                    s, t = fma(a0, load(b, y), load(out, z)), a1 * load(b, y + N)
                    s, t = fma(a2, load(b, y + 2 * N), s), fma(a3, load(b, y + 3 * N), t)
                    store(out, z, s + t)
        for k in range(K - K % 4, K):
            for i in range(first, last):
                a0 = broadcast(a[i * K + k])
                for j in range(begin, whole, LANES):
                    store(out, i * N + j, fma(a0, load(b, k * N + j), load(out, i * N + j)))
        if whole < end:
            n = end - whole
            for i in range(first, last):
                total = load_first(out, i * N + whole, n)
                for k in range(K):
                    a0 = broadcast(a[i * K + k])
                    total = fma(a0, load_first(b, k * N + whole, n), total)
                store_first(out, i * N + whole, total, n)
