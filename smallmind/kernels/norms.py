"""Layer and RMS normalisation over the last axis (Ba et al. 2016, Zhang & Sennrich 2019).

The loops run in the first-level cache, where `load_up_to` would cost up to 10 %: the tails are
handled separately. Every
pass covers a block of rows: the sums of a row are a chain of additions, and the CPU runs the chains
of different rows in parallel.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, row_share
from smallmind.kernels.codegen.scratch import absent, scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    borrow,
    broadcast,
    fma,
    keep_first,
    lane_sum,
    load,
    load_first,
    start_of_overlapping,
    store,
    store_first,
)
from smallmind.kernels.reduce import CHUNK_ROWS, add_chunks

BLOCK_ELEMENTS = 2048  # that are processed while they are in the first-level cache


def layernorm(out, mean, rstd, x, weight, bias=None, epsilon=1e-5):
    bias = absent(weight.dtype, 1) if bias is None else bias
    _layernorm(out, mean, rstd, x, weight, bias, np.float32(epsilon))


@parallel_jit
def _layernorm(out, mean, rstd, x, weight, bias, epsilon, workers):
    for worker in prange(workers):
        begin, end = row_share(x.shape[0], np.int64(worker), workers)
        _layernorm_rows(out, mean, rstd, x, weight, bias, epsilon, begin, end)


@jit
def _layernorm_rows(out, mean, rstd, x, weight, bias, epsilon, begin, end):
    C = x.shape[1]
    tail = C % LANES
    whole = C - tail
    step = max(1, BLOCK_ELEMENTS // C)
    for start in range(begin, end, step):
        stop = min(end, start + step)
        for r in range(start, stop):
            row = r * C
            total = broadcast(np.float32(0))
            for c in range(0, whole, LANES):
                total = total + load(x, row + c)
            if tail:
                total = total + load_first(x, row + whole, tail)
            mean[r] = lane_sum(total) / np.float32(C)
        for r in range(start, stop):
            row, m = r * C, mean[r]
            squares = broadcast(np.float32(0))
            for c in range(0, whole, LANES):
                d = load(x, row + c) - m
                squares = fma(d, d, squares)
            if tail:
                d = keep_first(load_first(x, row + whole, tail) - m, tail)
                squares = fma(d, d, squares)
            rstd[r] = np.float32(1) / np.sqrt(lane_sum(squares) / np.float32(C) + epsilon)
        for r in range(start, stop):
            row, m, s = r * C, mean[r], rstd[r]
            for c in range(0, whole, LANES):
                y = (load(x, row + c) - m) * s * load(weight, c)
                if bias.size > 0:
                    y = y + load(bias, c)
                store(out, row + c, y)
            if tail:
                y = (load_first(x, row + whole, tail) - m) * s * load_first(weight, whole, tail)
                if bias.size > 0:
                    y = y + load_first(bias, whole, tail)
                store_first(out, row + whole, y, tail)


def layernorm_backward(dx, dweight, dbias, dy, x, mean, rstd, weight, addend=None):
    R, C = x.shape
    partial = scratch(ceil_div(R, CHUNK_ROWS), 2 * C + 2 * CHUNK_ROWS)  # see ChunkSums
    addend = absent(dx.dtype, 2) if addend is None else addend
    dbias = absent(dweight.dtype, 1) if dbias is None else dbias
    _layernorm_backward(dx, dweight, dbias, partial, dy, x, mean, rstd, weight, addend)


@parallel_jit
def _layernorm_backward(dx, dweight, dbias, partial, dy, x, mean, rstd, weight, addend):
    R, C = x.shape
    for chunk in prange(ceil_div(R, CHUNK_ROWS)):
        _layernorm_backward_rows(
            dx, partial[chunk], dy, x, mean, rstd, weight, addend, np.int64(chunk)
        )
    add_chunks(dweight, partial, 0)
    add_chunks(dbias, partial, C)


class ChunkSums(NamedTuple):
    """The scratch of a chunk of rows."""

    dweight: Any  # (C,)
    dbias: Any  # (C,)
    mean_dxhat: Any  # of each row of a block, (CHUNK_ROWS,)
    mean_dxhat_xhat: Any


@jit
def _chunk_sums(partial, C):
    means = partial[2 * C :]
    return ChunkSums(partial[:C], partial[C : 2 * C], means[:CHUNK_ROWS], means[CHUNK_ROWS:])


@jit
def _layernorm_backward_rows(dx, partial, dy, x, mean, rstd, weight, addend, chunk):
    # forward: xhat = (x - mean) rstd, y = xhat weight + bias
    # backward, with dxhat = dy weight and means over a row:
    #   dx = rstd (dxhat - mean(dxhat) - xhat mean(dxhat xhat))
    R, C = x.shape
    tail = C % LANES
    whole = C - tail
    sums = _chunk_sums(borrow(partial), C)
    dweight, dbias = sums.dweight, sums.dbias
    end = min(R, chunk * CHUNK_ROWS + CHUNK_ROWS)
    step = max(1, BLOCK_ELEMENTS // C)
    dweight[:] = np.float32(0)
    dbias[:] = np.float32(0)
    for start in range(chunk * CHUNK_ROWS, end, step):
        stop = min(end, start + step)
        _row_means(sums, dy, x, mean, rstd, weight, start, stop)
        for r in range(start, stop):
            row, m, s = r * C, mean[r], rstd[r]
            a, b = sums.mean_dxhat[r - start], sums.mean_dxhat_xhat[r - start]
            for c in range(0, whole, LANES):
                g, xhat = load(dy, row + c), (load(x, row + c) - m) * s
                store(dweight, c, fma(g, xhat, load(dweight, c)))
                store(dbias, c, load(dbias, c) + g)
                d = (g * load(weight, c) - a - xhat * b) * s
                if addend.size > 0:
                    d = d + load(addend, row + c)
                store(dx, row + c, d)
            if tail:
                c = whole
                g, xhat = load_first(dy, row + c, tail), (load_first(x, row + c, tail) - m) * s
                store_first(dweight, c, fma(g, xhat, load_first(dweight, c, tail)), tail)
                store_first(dbias, c, load_first(dbias, c, tail) + g, tail)
                d = (g * load_first(weight, c, tail) - a - xhat * b) * s
                if addend.size > 0:
                    d = d + load_first(addend, row + c, tail)
                store_first(dx, row + c, d, tail)


@jit
def _row_means(sums, dy, x, mean, rstd, weight, start, stop):
    """Writes mean(dxhat) and mean(dxhat xhat) of the rows start..stop."""
    C = x.shape[1]
    tail = C % LANES
    whole = C - tail
    for r in range(start, stop):
        row, m, s = r * C, mean[r], rstd[r]
        plain, weighted = broadcast(np.float32(0)), broadcast(np.float32(0))
        for c in range(0, whole, LANES):
            dxhat = load(dy, row + c) * load(weight, c)
            plain, weighted = plain + dxhat, fma(dxhat, (load(x, row + c) - m) * s, weighted)
        if tail:
            dxhat = load_first(dy, row + whole, tail) * load_first(weight, whole, tail)
            xhat = (load_first(x, row + whole, tail) - m) * s
            plain, weighted = plain + dxhat, fma(dxhat, xhat, weighted)
        sums.mean_dxhat[r - start] = lane_sum(plain) / np.float32(C)
        sums.mean_dxhat_xhat[r - start] = lane_sum(weighted) / np.float32(C)


def rmsnorm(out, rstd, x, weight, epsilon=1e-5):
    _rmsnorm(out, rstd, x, weight, np.float32(epsilon))


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
    step = max(1, BLOCK_ELEMENTS // C)
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
    partial = scratch(ceil_div(rstd.size, CHUNK_ROWS), weight.size + CHUNK_ROWS)
    addend = absent(dx.dtype, 2) if addend is None else addend
    _rmsnorm_backward(dx, dweight, partial, dy, x, rstd, weight, addend)


@parallel_jit
def _rmsnorm_backward(dx, dweight, partial, dy, x, rstd, weight, addend):
    for chunk in prange(ceil_div(rstd.size, CHUNK_ROWS)):
        first = np.int64(chunk) * CHUNK_ROWS
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
    end = min(rstd.size, first + CHUNK_ROWS)
    step = max(1, BLOCK_ELEMENTS // C)
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
