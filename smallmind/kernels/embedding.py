"""Rows of an embedding by their numbers, and the scatter of their gradients."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.blocks import bytes_from, bytes_of, load_stored, move_row
from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, row_share
from smallmind.kernels.codegen.scratch import absent, scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    load_up_to,
    share,
    start_of_overlapping,
    store_up_to,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.number_types import GROUP, is_quantised
from smallmind.kernels.rope import BEGINNING, start_of


def embedding(out, weight, ids, addend=None, starts=None, in_groups=False):
    assert addend is None or starts is not None or len(addend) == ids.size
    # Rows of the addend that are added, one after the other, from a start on.
    period = 0 if addend is None else ids.size if starts is None else ids.shape[1]
    if is_quantised(weight.dtype):
        weight, kind = bytes_of(weight), out.dtype
    else:
        kind = weight.dtype
    addend = absent(kind, 2) if addend is None else addend
    starts = BEGINNING if starts is None else starts
    rows = scratch(threads(), out.shape[1] if in_groups else 1)
    _embedding(out, weight, ids.reshape(-1), addend, period, starts, rows, in_groups)


@parallel_jit
def _embedding(out, weight, ids, addend, period, starts, rows, in_groups):
    workers = rows.shape[0]
    for worker in prange(workers):
        own = at(rows, np.int64(worker) * rows.shape[1])
        first, last = row_share(ids.size, np.int64(worker), workers)
        pointers = start_of_overlapping(out), start_of_overlapping(addend)
        whole = weight.shape[0] // GROUP * GROUP if in_groups else 0
        shape = out.shape[1], period, whole
        _embedding_rows(*pointers, shape, starts, weight, ids, own, first, last)


@jit
def _embedding_rows(out, addend, shape, starts, weight, ids, own, first, last):
    """Writes the rows first..last. own: scratch for a row of those that are in groups."""
    C, period, whole_groups = shape
    tail = C % LANES
    whole = C - tail
    adds = period > 0
    for r in range(first, last):
        number, target = np.int64(ids[r]), r * C
        source, other = at(weight, 0), 0
        row = number * C
        if number < whole_groups:
            source, row = bytes_from(weight, own), 0
            move_row(source, weight, number)
        if adds:
            b = r // period
            other = (start_of(starts, b) + r - b * period) * C
        for c in range(0, whole, LANES):
            _embed(out, target + c, source, row + c, addend, other + c, adds, LANES)
        if tail:
            _embed(out, target + whole, source, row + whole, addend, other + whole, adds, tail)


@inline_jit
def _embed(out, target, weight, place, addend, other, adds, count):
    """Writes `count` elements of a row."""
    value = load_stored(weight, place, count)
    if adds:
        value = value + load_up_to(addend, other, count)
    store_up_to(out, target, value, count)


def embedding_backward(dweight, daddend, dout, ids):
    # A range of channels of dweight belongs to one thread, which visits all rows, so that equal ids
    # never collide; so does a range of elements of daddend.
    daddend = absent(dweight.dtype, 2) if daddend is None else daddend
    _embedding_backward(dweight, daddend, dout, ids)


@parallel_jit
def _embedding_backward(dweight, daddend, dout, ids):
    groups = ceil_div(dout.shape[1], LANES)
    kinds = 2 if daddend.size > 0 else 1
    # In turn, so that threads have some of both: the ranges of dweight take longer.
    for index in prange(kinds * groups):
        piece = np.int64(index)
        if piece % kinds == 0:
            _add_to_weight(dweight, dout, ids, piece // kinds * LANES)
        else:
            first, last = share(dout.shape[1] * ids.shape[1], piece // kinds, groups)
            _add_to_addend(daddend, dout, ids, first, last)


@jit
def _add_to_weight(dweight, dout, ids, c):
    """Adds the channels from c on, of one vector."""
    # forward: out[b, t] = weight[ids[b, t]] + addend[t]
    B, T = ids.shape
    C = dout.shape[1]
    count = min(LANES, C - c)
    for b in range(B):
        for t in range(T):
            row = np.int64(ids[b, t]) * C + c
            d = load_up_to(dout, (b * T + t) * C + c, count)
            store_up_to(dweight, row, load_up_to(dweight, row, count) + d, count)


@jit
def _add_to_addend(daddend, dout, ids, first, last):
    """Adds the elements first..last of the positions: a sum over sequences each."""
    # forward: out[b, t] = weight[ids[b, t]] + addend[t]
    B, T = ids.shape
    size = T * dout.shape[1]
    for place in range(first, last, LANES):
        count = min(LANES, last - place)
        total = load_up_to(daddend, place, count)
        for b in range(B):
            total = total + load_up_to(dout, b * size + place, count)
        store_up_to(daddend, place, total, count)
