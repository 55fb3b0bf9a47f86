"""Causal multi-head attention, fused: scores exist only in tiles of scratch, never as T x T.

TILE_ROWS queries at a time are processed, whose scores against all earlier keys fit the cache. Keys
before the documents of all of them are skipped. For the backward pass only the logarithm of each
row's sum of exponentials is kept (Dao et al. 2022).
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.attention_heads import (
    attention_shape,
    first_column,
    first_key,
    first_keys,
    head_at,
    multiply,
    pack_columns,
    pack_rows,
    panel_elements,
    row_elements,
    row_of_share,
    score_row,
    write_row,
)
from smallmind.kernels.codegen.jit import called_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    broadcast,
    dropout_factors,
    exp,
    first_or,
    keep_first,
    lane_maximum,
    lane_sum,
    load,
    maximum,
    store,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.dropout import Mask, dropout_threshold, mask_of_head
from smallmind.kernels.gemm.tile import PANEL, TILE_ROWS, Extent, Rows, Strip


def attention(out, logsumexp, qkv, key=0, probability=0.0, first_row=0, firsts=None):
    """qkv (B T, (H + 2 G) D) -> out (B T, H D); keeps logsumexp (B, H, T). Writes both.

    The columns of qkv are H heads of queries, G of keys and G of values, of D channels each; H / G
    heads of queries share keys and values (Ainslie et al. 2023).
    out = dropout(softmax(q k^T / sqrt(D), over the keys not after the query)) v, head by head;
    the dropout mask follows from key (64 bits) and first_row, the place of qkv in its batch, and is
    off at probability 0. With firsts (B, T) queries do not see the keys before theirs either.
    """
    threshold, factor = dropout_threshold(probability)
    shape = attention_shape(qkv, out, logsumexp, firsts)
    rows = scratch(threads(), _forward_layout(shape.T, shape.D).size)
    first_head = first_row // shape.T * shape.H
    mask = Mask(np.uint64(key), threshold, factor)
    _attention(out, logsumexp, qkv, first_keys(firsts), mask, first_head, rows, shape)


@parallel_jit
def _attention(out, logsumexp, qkv, firsts, mask, first_head, scratch, shape):
    workers = scratch.shape[0]
    heads, T = shape.B * shape.H, shape.T
    for worker in prange(workers):
        own = at(scratch, worker * scratch.shape[1])
        begin, end = heads * np.int64(worker), heads * (np.int64(worker) + 1)
        for index in range(begin // workers, ceil_div(end, workers)):
            # The first and the last head may be shared with the workers before and after. The work
            # of the first n rows grows as the square of n.
            first = row_of_share(T, np.sqrt(max(0, begin - index * workers) / workers))
            last = row_of_share(T, np.sqrt(min(workers, end - index * workers) / workers))
            if first < last:
                head = head_at(index, shape, at(firsts, 0))
                dropped = mask_of_head(mask, first_head + index)
                starts = at(out, 0), at(logsumexp, 0), at(qkv, 0)
                _attention_rows(*starts, head, first, last, own, dropped)


class ForwardLayout(NamedTuple):
    """Where the parts of the forward pass's scratch begin; at 0, the keys of a head, in panels."""

    values: int  # of a head
    scores: int  # of a tile of queries, as all below
    sums: int  # of the exponentials
    queries: int
    results: int
    size: int


@called_jit
def _forward_layout(T, D):
    values = panel_elements(T, D)
    scores = values + row_elements(T, D)
    sums = scores + TILE_ROWS * score_row(T)
    queries = sums + TILE_ROWS * 16
    results = queries + row_elements(TILE_ROWS, D)
    return ForwardLayout(
        values, scores, sums, queries, results, results + row_elements(TILE_ROWS, D)
    )


@jit
def _attention_rows(out, logsumexp, qkv, head, begin, end, scratch, mask):
    """The queries begin..end of one head. Takes pointers to the arrays."""
    T, D, C, width = head.T, head.D, head.C, head.width
    layout = _forward_layout(T, D)
    keys, values = scratch, at(scratch, layout.values)
    scores, sums = at(scratch, layout.scores), at(scratch, layout.sums)
    queries, results = at(scratch, layout.queries), at(scratch, layout.results)
    D_row, T_row = round_up(D, LANES), score_row(T)
    scale = np.float32(1 / np.sqrt(D))
    pack_columns(keys, qkv, head.keys, width, end, D)
    pack_rows(values, qkv, head.values, width, end, D)
    for first in range(begin, end, TILE_ROWS):
        rows = min(TILE_ROWS, end - first)
        left, seen = first_column(head, first), first + rows
        pack_rows(queries, qkv, head.queries + first * width, width, rows, D)
        for panel in range(left // PANEL * PANEL, seen, PANEL):
            column = max(left, panel)
            columns = min(panel + PANEL, round_up(seen, LANES)) - column
            multiply(
                Rows(at(scores, column), T_row),
                Strip(at(queries, 0), TILE_ROWS * D_row, D_row, 1),
                Rows(at(keys, panel * D + column - panel), PANEL),
                Extent(rows, columns, D),
            )
        # Each pass covers all rows: within one row, a pass would have to wait for the one before.
        hides = first_key(head, seen - 1) > left
        for i in range(rows):
            if hides:
                _hide_keys(scores, i * T_row, left, first_key(head, first + i))
            top = _row_maximum(scores, i * T_row + left, first + i + 1 - left)
            logsumexp[head.logsumexp + first + i] = top
        for i in range(rows):
            top = logsumexp[head.logsumexp + first + i]
            hidden = first_key(head, first + i) - left if hides else 0
            shown = Shown(hidden, first + i + 1 - left, round_up(seen, LANES) - left)
            start, counter = i * T_row + left, (first + i) * T + left
            sums[i] = _exponentials(scores, start, shown, top, scale, mask, counter)
        for column in range(0, D, PANEL):
            multiply(
                Rows(at(results, column), D_row),
                Strip(at(scores, left), TILE_ROWS * T_row, T_row, 1),
                Rows(at(values, left * D_row + column), D_row),
                Extent(rows, min(PANEL, D_row - column), seen - left),
            )
        for i in range(rows):
            factor = np.float32(1) / sums[i]
            write_row(out, head.out + (first + i) * C, results, i * D_row, D, factor)
            row = head.logsumexp + first + i
            logsumexp[row] = logsumexp[row] * scale + np.log(sums[i])


@jit
def _hide_keys(scores, s, left, first):
    """Of a row that begins at s, the scores left..first become copies of the first one seen.

    So they change no maximum. Not -inf: CPUs take long where an exponential is too small for a
    float32.
    """
    copies = broadcast(scores[s + first])
    for j in range(left, first, LANES):
        store(scores, s + j, first_or(copies, first - j, load(scores, s + j)))


@jit
def _row_maximum(scores, s, count):
    """The largest of `count` scores from s on."""
    whole = count // LANES * LANES
    top = broadcast(scores[s])
    for j in range(0, whole, LANES):
        top = maximum(load(scores, s + j), top)
    if count > whole:
        top = maximum(first_or(load(scores, s + whole), count - whole, top), top)
    return lane_maximum(top)


class Shown(NamedTuple):
    """The scores first..last of a row whose keys the query sees, out of `width` scores."""

    first: int
    last: int
    width: int


@jit
def _exponentials(scores, s, shown, m, scale, mask, counter):
    """The scores of a row from s on -> exp((score - m) scale) after dropout; zeros if not shown.

    In place. Returns the sum of the exponentials, including the dropped ones.
    """
    zero, begin = broadcast(np.float32(0)), shown.first // LANES * LANES
    whole = shown.last // LANES * LANES
    tail = shown.last - whole
    total = zero
    for j in range(0, begin, LANES):
        store(scores, s + j, zero)
    for j in range(begin, whole, LANES):
        e = exp((load(scores, s + j) - m) * scale)
        if j < shown.first:
            e = first_or(zero, shown.first - j, e)
        total = total + e
        if mask.threshold > 0:
            e = e * dropout_factors(mask.key, counter + j, mask.threshold, mask.factor)
        store(scores, s + j, e)
    if tail:
        e = keep_first(exp((load(scores, s + whole) - m) * scale), tail)
        if whole < shown.first:
            e = first_or(zero, shown.first - whole, e)
        total = total + e
        if mask.threshold > 0:
            e = e * dropout_factors(mask.key, counter + whole, mask.threshold, mask.factor)
        store(scores, s + whole, e)
        whole += LANES
    for j in range(whole, shown.width, LANES):
        store(scores, s + j, zero)
    return lane_sum(total)
