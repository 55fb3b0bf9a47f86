"""The backward pass of `attention`, which recomputes its probabilities, ROWS queries at a time."""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.attention_heads import (
    ROWS,
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
    fma,
    keep_first,
    lane_sum,
    load,
    load_first,
    store,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.dropout import Mask, dropout_threshold, mask_of_head
from smallmind.kernels.gemm.tile import NULL, PANEL, TILE_ROWS, Extent, Rows, Strip, multiply_panel


class Span(NamedTuple):
    """Columns left..right."""

    left: int
    right: int


def attention_backward(
    dqkv, dout, out, logsumexp, qkv, key=0, probability=0.0, first_row=0, firsts=None
):
    """dout, out (B T, H D), logsumexp (B, H, T), qkv (B T, (H + 2 G) D) -> dqkv. Writes dqkv."""
    threshold, factor = dropout_threshold(probability)
    shape = attention_shape(qkv, out, logsumexp, firsts)
    rows = scratch(threads(), _backward_layout(shape.T, shape.D).size)
    first_head = first_row // shape.T * shape.H
    mask = Mask(np.uint64(key), threshold, factor)
    given = dqkv, dout, out, logsumexp, qkv, first_keys(firsts)
    _attention_backward(*given, mask, first_head, rows, shape)


@parallel_jit
def _attention_backward(dqkv, dout, out, logsumexp, qkv, firsts, mask, first_head, scratch, shape):
    workers = scratch.shape[0]
    T, shared = shape.T, shape.H // shape.G
    groups = shape.B * shape.G
    for worker in prange(workers):
        own = _backward_scratch(at(scratch, worker * scratch.shape[1]), T, shape.D)
        begin, end = groups * np.int64(worker), groups * (np.int64(worker) + 1)
        for group in range(begin // workers, ceil_div(end, workers)):
            first = row_of_share(T, max(0, begin - group * workers) / workers)
            last = row_of_share(T, min(workers, end - group * workers) / workers)
            if first < last:
                for number in range(shared):
                    index = group * shared + number
                    dropped = mask_of_head(mask, first_head + index)
                    forward = Forward(at(dout, 0), at(out, 0), at(logsumexp, 0), dropped)
                    head = head_at(index, shape, at(firsts, 0))
                    rows = Turn(first, last, number, shared)
                    _attention_backward_rows(at(dqkv, 0), at(qkv, 0), forward, head, rows, own)


class Turn(NamedTuple):
    """The rows begin..end of a head, and its number among those that share keys and values."""

    begin: int
    end: int
    number: int
    shared: int


class Forward(NamedTuple):
    """What the backward pass needs from the forward pass, besides queries, keys and values."""

    dout: Any  # a pointer to the array, as are the two below
    out: Any
    logsumexp: Any
    mask: Mask


class BackwardScratch(NamedTuple):
    """Pointers into the scratch of the backward pass of a head."""

    key_panels: Any
    value_panels: Any
    queries: Any  # in padded rows, as the four below
    keys: Any
    douts: Any
    dkeys: Any
    dvalues: Any
    p: Any  # probabilities of ROWS queries
    ds: Any  # gradients of their scores
    dqueries: Any  # of a tile of queries


class BackwardLayout(NamedTuple):
    """Where each group of these parts begins (panels at 0), and the size of a part of the group."""

    panel_size: int
    rows: int
    rows_size: int
    scores: int
    scores_size: int
    dqueries: int
    size: int


@called_jit
def _backward_layout(T, D):
    panel_size, rows_size = panel_elements(T, D), row_elements(T, D)
    scores_size = ROWS * score_row(T)
    rows = 2 * panel_size
    scores = rows + 5 * rows_size
    dqueries = scores + 2 * scores_size
    size = dqueries + row_elements(TILE_ROWS, D)
    return BackwardLayout(panel_size, rows, rows_size, scores, scores_size, dqueries, size)


@jit
def _backward_scratch(scratch, T, D):
    layout = _backward_layout(T, D)
    rows, rows_size = layout.rows, layout.rows_size
    return BackwardScratch(
        scratch,
        at(scratch, layout.panel_size),
        at(scratch, rows),
        at(scratch, rows + rows_size),
        at(scratch, rows + 2 * rows_size),
        at(scratch, rows + 3 * rows_size),
        at(scratch, rows + 4 * rows_size),
        at(scratch, layout.scores),
        at(scratch, layout.scores + layout.scores_size),
        at(scratch, layout.dqueries),
    )


@jit
def _attention_backward_rows(dqkv, qkv, forward, head, turn, own):
    """The gradients of the queries, keys and values begin..end of one head.

    A worker that owns the whole head computes each probability once; one that shares it computes
    those of its queries, and then those of its keys.
    """
    # forward: s = q k^T scale, p = exp(s - logsumexp), out = (p mask) v
    # backward, with dp = (dout v^T) mask and the mean of dp under p, which is dout . out:
    #   dv = (p mask)^T dout;  ds = p (dp - dout . out) scale;  dq = ds k;  dk = ds^T q
    T, D, width, begin, end = head.T, head.D, head.width, turn.begin, turn.end
    is_first = turn.number == 0
    if is_first:
        pack_columns(own.key_panels, qkv, head.keys, width, T, D)
        pack_columns(own.value_panels, qkv, head.values, width, T, D)
        pack_rows(own.keys, qkv, head.keys, width, T, D)
    pack_rows(own.queries, qkv, head.queries, width, T, D)
    pack_rows(own.douts, forward.dout, head.out, head.C, T, D)
    for first in range(begin, T, ROWS):
        last = min(T, first + ROWS)
        if first < end:
            _probabilities(own, forward, head, first, last, Span(0, last))
            _write_dqueries(dqkv, own, head, first, last)
        elif first_key(head, first) >= end:
            break  # no later query sees these keys
        else:
            _probabilities(own, forward, head, first, last, Span(begin, min(last, end)))
        _add_dkeys_and_dvalues(own, head, first, last, Span(begin, min(last, end)), is_first)
    if turn.number + 1 < turn.shared:
        return
    one, D_row = np.float32(1), round_up(D, LANES)
    for t in range(begin, end):
        write_row(dqkv, head.keys + t * width, own.dkeys, t * D_row, D, one)
        write_row(dqkv, head.values + t * width, own.dvalues, t * D_row, D, one)


@jit
def _write_dqueries(dqkv, own, head, first, last):
    """dq = ds k, for the queries first..last."""
    D, D_row, T_row = head.D, round_up(head.D, LANES), score_row(head.T)
    for tile in range(first, last, TILE_ROWS):
        count, left = min(TILE_ROWS, last - tile), first_column(head, tile)
        for column in range(0, D, PANEL):
            multiply(
                Rows(at(own.dqueries, column), D_row),
                Strip(at(own.ds, (tile - first) * T_row + left), TILE_ROWS * T_row, T_row, 1),
                Rows(at(own.keys, left * D_row + column), D_row),
                Extent(count, min(PANEL, D_row - column), tile + count - left),
            )
        for i in range(count):
            place = head.queries + (tile + i) * head.width
            write_row(dqkv, place, own.dqueries, i * D_row, D, np.float32(1))


@jit
def _add_dkeys_and_dvalues(own, head, first, last, keys, is_first):
    """dk += ds^T q, dv += (p mask)^T dout: what the queries first..last add to those of `keys`.

    The first queries that see a key, of the first head that shares it, write instead of adding.
    """
    D_row, T_row = round_up(head.D, LANES), score_row(head.T)
    end = first if head.firsts_step else last  # of the queries that see a tile of keys
    for tile in range(keys.left, keys.right, TILE_ROWS):
        count = min(TILE_ROWS, keys.right - tile)
        while end < last and first_key(head, end) < tile + count:
            end += 1
        start = max(first, tile)  # the queries before do not see the tile
        if start >= end:
            continue
        writes = is_first and tile >= first
        place = (start - first) * T_row + tile
        for column in range(0, head.D, PANEL):
            extent = Extent(count, min(PANEL, D_row - column), end - start)
            dkeys = Rows(at(own.dkeys, tile * D_row + column), D_row)
            dvalues = Rows(at(own.dvalues, tile * D_row + column), D_row)
            source = start * D_row + column
            multiply_panel(
                dkeys,
                Strip(at(own.ds, place), TILE_ROWS, 1, T_row),
                Rows(at(own.queries, source), D_row),
                extent,
                Rows(NULL, 0) if writes else dkeys,
                NULL,
                NULL,
            )
            multiply_panel(
                dvalues,
                Strip(at(own.p, place), TILE_ROWS, 1, T_row),
                Rows(at(own.douts, source), D_row),
                extent,
                Rows(NULL, 0) if writes else dvalues,
                NULL,
                NULL,
            )


@jit
def _probabilities(own, forward, head, first, last, keys):
    """Writes p and ds of the queries first..last, with zeros for the keys that a query ignores.

    Those before the first column of a tile of queries are left out.
    """
    T, D = head.T, head.D
    D_row, T_row = round_up(D, LANES), score_row(T)
    scale = np.float32(1 / np.sqrt(D))
    for tile in range(first, last, TILE_ROWS):
        count = min(TILE_ROWS, last - tile)
        left, seen = max(keys.left, first_column(head, tile)), min(tile + count, keys.right)
        place = (tile - first) * T_row
        for panel in range(left // PANEL * PANEL, seen, PANEL):
            column = max(left, panel)
            extent = Extent(count, min(panel + PANEL, round_up(seen, LANES)) - column, D)
            multiply(
                Rows(at(own.p, place + column), T_row),
                Strip(at(own.queries, tile * D_row), TILE_ROWS * D_row, D_row, 1),
                Rows(at(own.key_panels, panel * D + column - panel), PANEL),
                extent,
            )
            multiply(
                Rows(at(own.ds, place + column), T_row),
                Strip(at(own.douts, tile * D_row), TILE_ROWS * D_row, D_row, 1),
                Rows(at(own.value_panels, panel * D + column - panel), PANEL),
                extent,
            )
        for i in range(count):
            row = tile + i
            delta = _dot(forward.dout, forward.out, head.out + row * head.C, D)
            softmax = Softmax(scale, forward.logsumexp[head.logsumexp + row], delta)
            counter = row * T
            columns = Span(left, round_up(keys.right, LANES))
            start = place + i * T_row
            visible = Span(first_key(head, row), row + 1)
            _softmax_backward_row(
                own.p, own.ds, start, visible, columns, softmax, forward.mask, counter
            )


class Softmax(NamedTuple):
    """p = exp(score scale - logsumexp) of a row, and delta = the mean of dp under p."""

    scale: np.float32
    logsumexp: np.float32
    delta: np.float32


@jit
def _softmax_backward_row(p, ds, s, seen, columns, softmax, mask, counter):
    """Scores in p -> probabilities after dropout; their gradients in ds -> those of the scores.

    Both rows begin at s. Of the columns given, those that are not seen become zeros.
    """
    zero, count = broadcast(np.float32(0)), seen.right
    begin = max(columns.left, seen.left // LANES * LANES)
    for j in range(columns.left, min(columns.right, begin), LANES):
        store(p, s + j, zero)
        store(ds, s + j, zero)
    for j in range(begin, min(columns.right, round_up(count, LANES)), LANES):
        probability = exp(load(p, s + j) * softmax.scale - softmax.logsumexp)
        is_edge = j < seen.left or j + LANES > count
        if is_edge:
            probability = first_or(zero, seen.left - j, keep_first(probability, count - j))
        dprobability, kept = load(ds, s + j), probability
        if mask.threshold > 0:
            factors = dropout_factors(mask.key, counter + j, mask.threshold, mask.factor)
            dprobability, kept = dprobability * factors, probability * factors
        dscore = probability * (dprobability - softmax.delta) * softmax.scale
        if is_edge:
            dscore = first_or(zero, seen.left - j, keep_first(dscore, count - j))
        store(p, s + j, kept)
        store(ds, s + j, dscore)
    for j in range(max(columns.left, round_up(count, LANES)), columns.right, LANES):
        store(p, s + j, zero)
        store(ds, s + j, zero)


@jit
def _dot(a, b, place, count):
    """The dot product of the same `count` elements of two matrices."""
    total = broadcast(np.float32(0))
    for c in range(0, count, LANES):
        n = min(LANES, count - c)
        total = fma(load_first(a, place + c, n), load_first(b, place + c, n), total)
    return lane_sum(total)
