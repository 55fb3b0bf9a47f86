"""RMS normalisation (Zhang & Sennrich 2019) and its backward pass.

As in `layernorm`, every pass covers a block of rows: the chains of additions of different rows run
in parallel.
"""

import numpy as np
from numba import prange

from smallmind.kernels.absent import absent
from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, row_share
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    borrow,
    broadcast,
    fma,
    lane_sum,
    load,
    load_first,
    start_of_overlapping,
    store,
    store_first,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.reduce import CHUNK, add_chunks

BLOCK = 2048  # elements that are processed while they are in the first-level cache


def rmsnorm(out, rstd, x, weight, epsilon=1e-5):
    """x (R, C), weight (C,) -> out (R, C) = x rstd weight; keeps rstd (R,). Writes both.

    rstd = 1 / sqrt(mean(x^2) + epsilon).
    """
    _rmsnorm(out, rstd, x, weight, np.float32(epsilon), threads())


@parallel_jit
def _rmsnorm(out, rstd, x, weight, epsilon, workers):
    for worker in prange(workers):
        begin, end = row_share(rstd.size, np.int64(worker), workers)
        _rmsnorm_rows(out, rstd, x, weight, epsilon, begin, end)


@jit
def _rmsnorm_rows(out, rstd, x, weight, epsilon, begin, end):
    C = weight.size
    tail = C % LANES
    whole = C - tail
    step = max(1, BLOCK // C)
    for start in range(begin, end, step):
        stop = min(end, start + step)
        for r in range(start, stop):
            squares = broadcast(np.float32(0))
            for c in range(0, whole, LANES):
                value = load(x, r * C + c)
                squares = fma(value, value, squares)
            if tail:
                value = load_first(x, r * C + whole, tail)
                squares = fma(value, value, squares)
            rstd[r] = np.float32(1) / np.sqrt(lane_sum(squares) / np.float32(C) + epsilon)
        for r in range(start, stop):
            place, s = r * C, rstd[r]
            for c in range(0, whole, LANES):
                store(out, place + c, load(x, place + c) * s * load(weight, c))
            if tail:
                y = load_first(x, place + whole, tail) * s * load_first(weight, whole, tail)
                store_first(out, place + whole, y, tail)


def rmsnorm_backward(dx, dweight, dy, x, rstd, weight, addend=None):
    """dy, x (R, C), rstd (R,) -> dx (R, C) [+ addend (R, C)].

    Writes dx, which may be dy or addend; adds to dweight (C,).
    """
    partial = scratch(ceil_div(rstd.size, CHUNK), weight.size + CHUNK)
    addend = absent(dx.dtype, 2) if addend is None else addend
    _rmsnorm_backward(dx, dweight, partial, dy, x, rstd, weight, addend)


@parallel_jit
def _rmsnorm_backward(dx, dweight, partial, dy, x, rstd, weight, addend):
    for chunk in prange(ceil_div(rstd.size, CHUNK)):
        first = np.int64(chunk) * CHUNK
        gradients = start_of_overlapping(dx), start_of_overlapping(dy), start_of_overlapping(addend)
        adds = addend.size > 0
        _rmsnorm_backward_rows(*gradients, adds, partial[chunk], x, rstd, weight, first)
    add_chunks(dweight, partial, 0)


@jit
def _rmsnorm_backward_rows(dx, dy, addend, adds, partial, x, rstd, weight, first):
    # forward: xhat = x rstd, y = xhat weight
    # backward, with dxhat = dy weight and the mean over a row:
    #   dx = rstd (dxhat - xhat mean(dxhat xhat))
    C = weight.size
    tail = C % LANES
    whole = C - tail
    dweight, means = borrow(partial)[:C], borrow(partial)[C:]
    end = min(rstd.size, first + CHUNK)
    step = max(1, BLOCK // C)
    dweight[:] = np.float32(0)
    for start in range(first, end, step):
        stop = min(end, start + step)
        for r in range(start, stop):
            place, s = r * C, rstd[r]
            total = broadcast(np.float32(0))
            for c in range(0, whole, LANES):
                dxhat = load(dy, place + c) * load(weight, c)
                total = fma(dxhat, load(x, place + c) * s, total)
            if tail:
                dxhat = load_first(dy, place + whole, tail) * load_first(weight, whole, tail)
                total = fma(dxhat, load_first(x, place + whole, tail) * s, total)
            means[r - start] = lane_sum(total) / np.float32(C)
        for r in range(start, stop):
            place, s, mean = r * C, rstd[r], means[r - start]
            for c in range(0, whole, LANES):
                g, xhat = load(dy, place + c), load(x, place + c) * s
                store(dweight, c, fma(g, xhat, load(dweight, c)))
                d = (g * load(weight, c) - xhat * mean) * s
                if adds:
                    d = d + load(addend, place + c)
                store(dx, place + c, d)
            if tail:
                c = whole
                g, xhat = load_first(dy, place + c, tail), load_first(x, place + c, tail) * s
                store_first(dweight, c, fma(g, xhat, load_first(dweight, c, tail)), tail)
                d = (g * load_first(weight, c, tail) - xhat * mean) * s
                if adds:
                    d = d + load_first(addend, place + c, tail)
                store_first(dx, place + c, d, tail)
