"""RMS normalisation (Zhang & Sennrich 2019) of whole rows or of each head, and its backward pass.

As in `layernorm`, every pass covers a block of rows: the chains of additions of different rows run
in parallel.
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.absent import absent
from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
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


def rmsnorm(out, rstd, x, weight, first=0, epsilon=1e-5):
    """x (R, H D), weight (D,) -> out (R, W) = x rstd weight, head by head; keeps rstd (R, H).

    Writes rstd = 1 / sqrt(mean(x^2) + epsilon), the mean taken over the D channels of a head, and
    the columns first..first + H D of out. One head is the norm of whole rows.
    """
    heads = Heads(x.shape[1] // weight.size, weight.size, out.shape[1], first)
    _rmsnorm(out, rstd.reshape(-1), x, weight, heads, np.float32(epsilon), threads())


class Heads(NamedTuple):
    """`number` heads of D channels: contiguous in one matrix, from column `first` on in another."""

    number: int
    D: int
    width: int  # of the other matrix
    first: int


@jit
def _place(heads, r):
    """Where head number r, counted over all rows, begins in the matrix that holds other columns.

    And how many heads of its row are left, itself included.
    """
    row, head = r // heads.number, r % heads.number
    return row * heads.width + heads.first + head * heads.D, heads.number - head


@inline_jit
def _following(heads, place, left):
    """The same of the next head: dividing would take longer than its arithmetic."""
    if left > 1:
        return place + heads.D, left - 1
    return place + heads.D + heads.width - heads.number * heads.D, heads.number


@parallel_jit
def _rmsnorm(out, rstd, x, weight, heads, epsilon, workers):
    for worker in prange(workers):
        begin, end = row_share(rstd.size, np.int64(worker), workers)
        _rmsnorm_rows(out, rstd, x, weight, heads, epsilon, begin, end)


@jit
def _rmsnorm_rows(out, rstd, x, weight, heads, epsilon, begin, end):
    """The heads begin..end, counted over all rows."""
    D = heads.D
    tail = D % LANES
    whole = D - tail
    step = max(1, BLOCK // D)
    for start in range(begin, end, step):
        stop = min(end, start + step)
        for r in range(start, stop):
            squares = broadcast(np.float32(0))
            for c in range(0, whole, LANES):
                value = load(x, r * D + c)
                squares = fma(value, value, squares)
            if tail:
                value = load_first(x, r * D + whole, tail)
                squares = fma(value, value, squares)
            rstd[r] = np.float32(1) / np.sqrt(lane_sum(squares) / np.float32(D) + epsilon)
        place, left = _place(heads, start)
        for r in range(start, stop):
            s = rstd[r]
            for c in range(0, whole, LANES):
                store(out, place + c, load(x, r * D + c) * s * load(weight, c))
            if tail:
                y = load_first(x, r * D + whole, tail) * s * load_first(weight, whole, tail)
                store_first(out, place + whole, y, tail)
            place, left = _following(heads, place, left)


def rmsnorm_backward(dx, dweight, dy, x, rstd, weight, addend=None, first=0):
    """dy (R, W), x (R, H D), rstd (R, H) -> dx (R, W) [+ addend (R, W)].

    Writes the columns first..first + H D of dx, which may be dy or addend; adds to dweight (D,).
    """
    heads = Heads(x.shape[1] // weight.size, weight.size, dx.shape[1], first)
    partial = scratch(ceil_div(rstd.size, CHUNK), weight.size + CHUNK)
    addend = absent(dx.dtype, 2) if addend is None else addend
    _rmsnorm_backward(dx, dweight, partial, dy, x, rstd.reshape(-1), weight, addend, heads)


@parallel_jit
def _rmsnorm_backward(dx, dweight, partial, dy, x, rstd, weight, addend, heads):
    for chunk in prange(ceil_div(rstd.size, CHUNK)):
        first = np.int64(chunk) * CHUNK
        gradients = start_of_overlapping(dx), start_of_overlapping(dy), start_of_overlapping(addend)
        adds = addend.size > 0
        _rmsnorm_backward_rows(*gradients, adds, partial[chunk], x, rstd, weight, heads, first)
    add_chunks(dweight, partial, 0)


@jit
def _rmsnorm_backward_rows(dx, dy, addend, adds, partial, x, rstd, weight, heads, first):
    # forward: xhat = x rstd, y = xhat weight
    # backward, with dxhat = dy weight and the mean over a head:
    #   dx = rstd (dxhat - xhat mean(dxhat xhat))
    D = heads.D
    tail = D % LANES
    whole = D - tail
    dweight, means = borrow(partial)[:D], borrow(partial)[D:]
    end = min(rstd.size, first + CHUNK)
    step = max(1, BLOCK // D)
    dweight[:] = np.float32(0)
    for start in range(first, end, step):
        stop = min(end, start + step)
        place, left = _place(heads, start)
        for r in range(start, stop):
            s = rstd[r]
            total = broadcast(np.float32(0))
            for c in range(0, whole, LANES):
                dxhat = load(dy, place + c) * load(weight, c)
                total = fma(dxhat, load(x, r * D + c) * s, total)
            if tail:
                dxhat = load_first(dy, place + whole, tail) * load_first(weight, whole, tail)
                total = fma(dxhat, load_first(x, r * D + whole, tail) * s, total)
            means[r - start] = lane_sum(total) / np.float32(D)
            place, left = _following(heads, place, left)
        place, left = _place(heads, start)
        for r in range(start, stop):
            s, mean = rstd[r], means[r - start]
            for c in range(0, whole, LANES):
                g, xhat = load(dy, place + c), load(x, r * D + c) * s
                store(dweight, c, fma(g, xhat, load(dweight, c)))
                d = (g * load(weight, c) - xhat * mean) * s
                if adds:
                    d = d + load(addend, place + c)
                store(dx, place + c, d)
            if tail:
                c = whole
                g, xhat = load_first(dy, place + c, tail), load_first(x, r * D + c, tail) * s
                store_first(dweight, c, fma(g, xhat, load_first(dweight, c, tail)), tail)
                d = (g * load_first(weight, c, tail) - xhat * mean) * s
                if adds:
                    d = d + load_first(addend, place + c, tail)
                store_first(dx, place + c, d, tail)
            place, left = _following(heads, place, left)
