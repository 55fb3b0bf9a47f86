"""Rows of an embedding by their numbers, and the scatter of their gradients."""

from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.absent import absent
from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div
from smallmind.kernels.codegen.simd import (
    LANES,
    load,
    load_first,
    load_up_to,
    start_of_overlapping,
    store,
    store_first,
    store_up_to,
)
from smallmind.kernels.reduce import CHUNK

_BEGINNING = np.zeros((), np.int64)


class Added(NamedTuple):
    """The rows of a matrix that are added: `period` from `first` on, then these again."""

    first: int
    period: int  # 0: nothing is added


def embedding(out, weight, ids, addend=None, start=None):
    """ids (B, T), weight (V, C) -> out (B T, C) = weight[ids] [+ addend]. Writes out.

    addend is (B T, C), and may be out, or with start () it has a row per position (P, C), and the
    token t of each sequence is at position start + t.
    """
    assert addend is None or start is not None or len(addend) == ids.size
    period = 0 if addend is None else ids.size if start is None else ids.shape[1]
    addend = absent(weight.dtype, 2) if addend is None else addend
    start = _BEGINNING if start is None else start
    _embedding(out, weight, ids.reshape(-1), addend, period, start)


@parallel_jit
def _embedding(out, weight, ids, addend, period, start):
    added = Added(start[()], period)
    for chunk in prange(ceil_div(ids.size, CHUNK)):
        pointers = start_of_overlapping(out), start_of_overlapping(addend)
        _embedding_rows(*pointers, added, weight, ids, np.int64(chunk) * CHUNK)


@jit
def _embedding_rows(out, addend, added, weight, ids, first):
    C = weight.shape[1]
    tail = C % LANES
    whole = C - tail
    adds = added.period > 0
    for r in range(first, min(ids.size, first + CHUNK)):
        row = np.int64(ids[r]) * C
        other = (added.first + r % added.period) * C if adds else 0
        for c in range(0, whole, LANES):
            value = load(weight, row + c)
            if adds:
                value = value + load(addend, other + c)
            store(out, r * C + c, value)
        if tail:
            value = load_first(weight, row + whole, tail)
            if adds:
                value = value + load_first(addend, other + whole, tail)
            store_first(out, r * C + whole, value, tail)


def embedding_backward(dweight, daddend, dout, ids):
    """dout (B T, C), ids (B, T) -> adds to dweight (V, C) and, unless None, daddend (T, C).

    Each iteration owns a range of channels and visits all rows, so equal ids never collide.
    """
    daddend = absent(dweight.dtype, 2) if daddend is None else daddend
    _embedding_backward(dweight, daddend, dout, ids)


@parallel_jit
def _embedding_backward(dweight, daddend, dout, ids):
    for group in prange(ceil_div(dout.shape[1], LANES)):
        _embedding_backward_channels(dweight, daddend, dout, ids, np.int64(group) * LANES)


@jit
def _embedding_backward_channels(dweight, daddend, dout, ids, c):
    # forward: out[b, t] = weight[ids[b, t]] + addend[t]
    B, T = ids.shape
    C = dout.shape[1]
    count = min(LANES, C - c)
    adds = daddend.size > 0
    for b in range(B):
        for t in range(T):
            row, place = np.int64(ids[b, t]) * C + c, t * C + c
            d = load_up_to(dout, (b * T + t) * C + c, count)
            store_up_to(dweight, row, load_up_to(dweight, row, count) + d, count)
            if adds:
                store_up_to(daddend, place, load_up_to(daddend, place, count) + d, count)
