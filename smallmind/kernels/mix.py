"""Sums of two matrices with learned weights, their backward pass, copies of columns and rows."""

from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, row_share
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    borrow,
    broadcast,
    element,
    fma,
    lane_sum,
    load_up_to,
    start_of_overlapping,
    store_up_to,
)
from smallmind.kernels.reduce import CHUNK_ROWS, add_chunks


@parallel_jit
def copy_columns(out, x, first, workers):
    W, N = x.shape[1], out.shape[1]
    for worker in prange(workers):
        begin, end = row_share(x.shape[0], np.int64(worker), workers)
        for r in range(begin, end):
            for c in range(0, N, LANES):
                count = min(LANES, N - c)
                store_up_to(out, r * N + c, load_up_to(x, r * W + first + c, count), count)


@parallel_jit
def take_rows(out, x, rows, workers):
    C = x.shape[1]
    for worker in prange(workers):
        begin, end = row_share(out.shape[0], np.int64(worker), workers)
        for r in range(begin, end):
            _copy_row(out, r * C, x, np.int64(rows[r]) * C, C)


@parallel_jit
def put_rows(out, x, rows, workers):
    C = x.shape[1]
    for worker in prange(workers):
        begin, end = row_share(x.shape[0], np.int64(worker), workers)
        for r in range(begin, end):
            _copy_row(out, np.int64(rows[r]) * C, x, r * C, C)


@parallel_jit
def spread_columns(out, x, starts, scale, workers):
    r, N = x.shape
    factor = np.float32(scale)
    for worker in prange(workers):
        begin, end = row_share(out.shape[0], np.int64(worker), workers)
        for row in range(begin, end):
            first, last = np.int64(starts[row // r]), np.int64(starts[row // r + 1])
            _clear(out, row * N, row * N + first)
            for c in range(first, last, LANES):
                count = min(LANES, last - c)
                value = load_up_to(x, row % r * N + c, count) * factor
                store_up_to(out, row * N + c, value, count)
            _clear(out, row * N + last, (row + 1) * N)


@jit
def _clear(out, first, last):
    """Writes zeros to the elements first..last."""
    zero = broadcast(np.float32(0))
    for c in range(first, last, LANES):
        store_up_to(out, c, zero, min(LANES, last - c))


@parallel_jit
def gather_columns(dx, dout, starts, scale, workers):
    r, N = dx.shape
    factor = np.float32(scale)
    for worker in prange(workers):
        begin, end = row_share(r, np.int64(worker), workers)
        for row in range(begin, end):
            for i in range(len(starts) - 1):
                last = np.int64(starts[i + 1])
                for c in range(np.int64(starts[i]), last, LANES):
                    count = min(LANES, last - c)
                    value = load_up_to(dx, row * N + c, count)
                    value = value + load_up_to(dout, (i * r + row) * N + c, count) * factor
                    store_up_to(dx, row * N + c, value, count)


@jit
def _copy_row(out, to, x, start, C):
    """C elements of x from `start` on -> out from `to` on."""
    for c in range(0, C, LANES):
        count = min(LANES, C - c)
        store_up_to(out, to + c, load_up_to(x, start + c, count), count)


def mix(out, x, other, weights, first=0):
    _mix(out, x, other, weights, first)


@parallel_jit
def _mix(out, x, other, weights, first, workers):
    for worker in prange(workers):
        begin, end = row_share(x.shape[0], np.int64(worker), workers)
        pointers = start_of_overlapping(out), start_of_overlapping(x)
        columns = Columns(x.shape[1], out.shape[1], first)
        _mix_rows(*pointers, other, weights, columns, begin, end)


class Columns(NamedTuple):
    """The columns first..first + N of a matrix that has W."""

    N: int
    W: int
    first: int


@jit
def _mix_rows(out, x, other, weights, columns, begin, end):
    N, W, first = columns
    a, b = broadcast(element(weights, 0)), broadcast(element(weights, 1))
    for r in range(begin, end):
        for c in range(0, N, LANES):
            count = min(LANES, N - c)
            y = load_up_to(other, r * N + c, count) * b
            y = fma(load_up_to(x, r * N + c, count), a, y)
            store_up_to(out, r * W + first + c, y, count)


def mix_backward(dx, dother, dweights, x, other, weights, first=0):
    partial = scratch(ceil_div(x.shape[0], CHUNK_ROWS), 2)
    _mix_backward(dx, dother, dweights, partial, x, other, weights, first)


@parallel_jit
def _mix_backward(dx, dother, dweights, partial, x, other, weights, first):
    for chunk in prange(ceil_div(x.shape[0], CHUNK_ROWS)):
        _mix_backward_rows(
            dx,
            dother,
            borrow(partial[chunk]),
            x,
            other,
            weights,
            first,
            np.int64(chunk) * CHUNK_ROWS,
        )
    add_chunks(dweights, partial, 0)


@jit
def _mix_backward_rows(dx, dother, sums, x, other, weights, first, start):
    # forward: out = weights[0] x + weights[1] other
    (R, N), W = x.shape, dx.shape[1]
    a, b = broadcast(element(weights, 0)), broadcast(element(weights, 1))
    of_x, of_other = broadcast(np.float32(0)), broadcast(np.float32(0))
    for r in range(start, min(R, start + CHUNK_ROWS)):
        for c in range(0, N, LANES):
            count = min(LANES, N - c)
            place, wide = r * N + c, r * W + first + c
            d = load_up_to(dx, wide, count)
            of_x = fma(d, load_up_to(x, place, count), of_x)
            of_other = fma(d, load_up_to(other, place, count), of_other)
            store_up_to(dother, place, fma(d, b, load_up_to(dother, place, count)), count)
            store_up_to(dx, wide, d * a, count)
    sums[0], sums[1] = lane_sum(of_x), lane_sum(of_other)
