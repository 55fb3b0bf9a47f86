"""Causal multi-head attention, fused: scores exist only in tiles of scratch, never as T x T.

Forward processes TILE_ROWS queries at a time, whose scores against all earlier keys fit the cache,
and keeps for the backward pass only the logarithm of each row's sum of exponentials (Dao et al.
2022). Backward recomputes the probabilities from it, ROWS queries at a time.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import called_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    broadcast,
    dropout_factors,
    element,
    exp,
    first_or,
    fma,
    keep_first,
    lane_maximum,
    lane_sum,
    load,
    load_first,
    maximum,
    store,
    store_first,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.dropout import Mask, dropout_threshold, mask_of_head
from smallmind.kernels.gemm.tile import (
    NULL,
    PANEL,
    TILE_ROWS,
    Extent,
    Rows,
    Strip,
    multiply_panel,
)

ROWS = 8 * TILE_ROWS  # queries whose probabilities the backward pass holds at once


class Head(NamedTuple):
    """One head of one sequence, and where it begins in the arrays. All indices are flat."""

    T: int
    D: int
    C: int
    qkv: int  # in qkv (B T, 3 C): its first query
    out: int  # in out (B T, C)
    logsumexp: int  # in logsumexp (B, H, T)


class Span(NamedTuple):
    """Columns left..right."""

    left: int
    right: int


def attention(out, logsumexp, qkv, key=0, probability=0.0, first_row=0):
    """qkv (B T, 3 C) -> out (B T, C); keeps logsumexp (B, H, T). Writes out, logsumexp.

    The columns of qkv are queries, keys and values, each of H heads of C / H channels.
    out = dropout(softmax(q k^T / sqrt(D), over the keys not after the query)) v, head by head;
    the dropout mask follows from key (64 bits) and first_row, the place of qkv in its batch, and is
    off at probability 0.
    """
    threshold, factor = dropout_threshold(probability)
    T, D = logsumexp.shape[2], out.shape[1] // logsumexp.shape[1]
    rows = scratch(threads(), _forward_layout(T, D).size)
    first_head = first_row // T * logsumexp.shape[1]
    mask = Mask(np.uint64(key), threshold, factor)
    _attention(out, logsumexp, qkv, mask, first_head, rows)


@parallel_jit
def _attention(out, logsumexp, qkv, mask, first_head, scratch):
    workers = scratch.shape[0]
    heads = logsumexp.shape[0] * logsumexp.shape[1]
    T = logsumexp.shape[2]
    for worker in prange(workers):
        own = at(scratch, worker * scratch.shape[1])
        begin, end = heads * np.int64(worker), heads * (np.int64(worker) + 1)
        for index in range(begin // workers, ceil_div(end, workers)):
            # The first and the last head may be shared with the workers before and after. The work
            # of the first n rows grows as the square of n.
            first = _row_of_share(T, np.sqrt(max(0, begin - index * workers) / workers))
            last = _row_of_share(T, np.sqrt(min(workers, end - index * workers) / workers))
            if first < last:
                head, dropped = _head(index, out, logsumexp), mask_of_head(mask, first_head + index)
                starts = at(out, 0), at(logsumexp, 0), at(qkv, 0)
                _attention_rows(*starts, head, first, last, own, dropped)


@jit
def _row_of_share(T, share):
    """The row at a share of T, moved to the nearest block boundary of the backward pass."""
    return T if share >= 1 else min(T, np.int64(share * T + ROWS / 2) // ROWS * ROWS)


@jit
def _head(index, out, logsumexp):
    H, T = logsumexp.shape[1:]
    C = out.shape[1]
    b, h = index // H, index % H
    place = h * (C // H)
    qkv, row = b * T * 3 * C + place, b * T * C + place
    return Head(T, C // H, C, qkv, row, index * T)


@called_jit
def _panels(T, D):
    """Elements of the keys or values of a head, in panels."""
    return round_up(T, PANEL) * D


@called_jit
def _rows(T, D):
    """Elements of the queries, keys or values of a head, in padded rows."""
    return T * round_up(D, LANES)


@called_jit
def _score_row(T):
    """Elements between rows of scores: a power of two would use only few sets of the cache."""
    return round_up(T, PANEL) + 16


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
    values = _panels(T, D)
    scores = values + _rows(T, D)
    sums = scores + TILE_ROWS * _score_row(T)
    queries = sums + TILE_ROWS * 16
    results = queries + _rows(TILE_ROWS, D)
    return ForwardLayout(values, scores, sums, queries, results, results + _rows(TILE_ROWS, D))


@jit
def _attention_rows(out, logsumexp, qkv, head, begin, end, scratch, mask):
    """The queries begin..end of one head. Takes pointers to the arrays."""
    T, D, C = head.T, head.D, head.C
    layout = _forward_layout(T, D)
    keys, values = scratch, at(scratch, layout.values)
    scores, sums = at(scratch, layout.scores), at(scratch, layout.sums)
    queries, results = at(scratch, layout.queries), at(scratch, layout.results)
    D_row, T_row = round_up(D, LANES), _score_row(T)
    scale = np.float32(1 / np.sqrt(D))
    _pack_columns(keys, qkv, head.qkv + C, 3 * C, end, D)
    _pack_rows(values, qkv, head.qkv + 2 * C, 3 * C, end, D)
    for first in range(begin, end, TILE_ROWS):
        rows = min(TILE_ROWS, end - first)
        seen = first + rows
        _pack_rows(queries, qkv, head.qkv + first * 3 * C, 3 * C, rows, D)
        for column in range(0, seen, PANEL):
            width = min(PANEL, round_up(seen - column, LANES))
            _multiply(
                Rows(at(scores, column), T_row),
                Strip(at(queries, 0), TILE_ROWS * D_row, D_row, 1),
                Rows(at(keys, column * D), PANEL),
                Extent(rows, width, D),
            )
        # Each pass covers all rows: within one row, a pass would have to wait for the one before.
        for i in range(rows):
            top = _row_maximum(scores, i * T_row, first + i + 1)
            logsumexp[head.logsumexp + first + i] = top
        for i in range(rows):
            top = logsumexp[head.logsumexp + first + i]
            width, counter = round_up(seen, LANES), (first + i) * T
            sums[i] = _exponentials(
                scores, i * T_row, first + i + 1, width, top, scale, mask, counter
            )
        for column in range(0, D, PANEL):
            _multiply(
                Rows(at(results, column), D_row),
                Strip(at(scores, 0), TILE_ROWS * T_row, T_row, 1),
                Rows(at(values, column), D_row),
                Extent(rows, min(PANEL, D_row - column), seen),
            )
        for i in range(rows):
            factor = np.float32(1) / sums[i]
            _write_row(out, head.out + (first + i) * C, results, i * D_row, D, factor)
            row = head.logsumexp + first + i
            logsumexp[row] = logsumexp[row] * scale + np.log(sums[i])


@jit
def _multiply(c, a, b, extent):
    """c = a b: `multiply_panel` with nothing to add and nothing to pack."""
    multiply_panel(c, a, b, extent, Rows(NULL, 0), NULL, NULL)


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


@jit
def _exponentials(scores, s, count, width, m, scale, mask, counter):
    """`count` scores from s on -> exp((score - m) scale) after dropout, then zeros up to width.

    In place. Returns the sum of the exponentials, including the dropped ones.
    """
    whole = count // LANES * LANES
    tail = count - whole
    total = broadcast(np.float32(0))
    for j in range(0, whole, LANES):
        e = exp((load(scores, s + j) - m) * scale)
        total = total + e
        if mask.threshold > 0:
            e = e * dropout_factors(mask.key, counter + j, mask.threshold, mask.factor)
        store(scores, s + j, e)
    if tail:
        e = keep_first(exp((load(scores, s + whole) - m) * scale), tail)
        total = total + e
        if mask.threshold > 0:
            e = e * dropout_factors(mask.key, counter + whole, mask.threshold, mask.factor)
        store(scores, s + whole, e)
        whole += LANES
    for j in range(whole, width, LANES):
        store(scores, s + j, broadcast(np.float32(0)))
    return lane_sum(total)


@jit
def _write_row(out, place, x, source, count, factor):
    """`count` elements of x from source on, times factor -> out from place on."""
    whole = count // LANES * LANES
    for c in range(0, whole, LANES):
        store(out, place + c, load(x, source + c) * factor)
    if count > whole:
        store_first(out, place + whole, load(x, source + whole) * factor, count - whole)


def attention_backward(dqkv, dout, out, logsumexp, qkv, key=0, probability=0.0, first_row=0):
    """dout, out (B T, C), logsumexp (B, H, T), qkv (B T, 3 C) -> dqkv (B T, 3 C). Writes dqkv."""
    threshold, factor = dropout_threshold(probability)
    T, D = logsumexp.shape[2], out.shape[1] // logsumexp.shape[1]
    rows = scratch(threads(), _backward_layout(T, D).size)
    first_head = first_row // T * logsumexp.shape[1]
    mask = Mask(np.uint64(key), threshold, factor)
    _attention_backward(dqkv, dout, out, logsumexp, qkv, mask, first_head, rows)


@parallel_jit
def _attention_backward(dqkv, dout, out, logsumexp, qkv, mask, first_head, scratch):
    workers = scratch.shape[0]
    heads = logsumexp.shape[0] * logsumexp.shape[1]
    T, D = logsumexp.shape[2], out.shape[1] // logsumexp.shape[1]
    for worker in prange(workers):
        own = _backward_scratch(at(scratch, worker * scratch.shape[1]), T, D)
        begin, end = heads * np.int64(worker), heads * (np.int64(worker) + 1)
        for index in range(begin // workers, ceil_div(end, workers)):
            first = _row_of_share(T, max(0, begin - index * workers) / workers)
            last = _row_of_share(T, min(workers, end - index * workers) / workers)
            if first < last:
                dropped = mask_of_head(mask, first_head + index)
                forward = Forward(at(dout, 0), at(out, 0), at(logsumexp, 0), dropped)
                head = _head(index, out, logsumexp)
                _attention_backward_rows(at(dqkv, 0), at(qkv, 0), forward, head, first, last, own)


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
    panel_size, rows_size, scores_size = _panels(T, D), _rows(T, D), ROWS * _score_row(T)
    rows = 2 * panel_size
    scores = rows + 5 * rows_size
    dqueries = scores + 2 * scores_size
    size = dqueries + _rows(TILE_ROWS, D)
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
def _attention_backward_rows(dqkv, qkv, forward, head, begin, end, own):
    """The gradients of the queries, keys and values begin..end of one head.

    A worker that owns the whole head computes each probability once; one that shares it computes
    those of its queries, and then those of its keys.
    """
    # forward: s = q k^T scale, p = exp(s - logsumexp), out = (p mask) v
    # backward, with dp = (dout v^T) mask and the mean of dp under p, which is dout . out:
    #   dv = (p mask)^T dout;  ds = p (dp - dout . out) scale;  dq = ds k;  dk = ds^T q
    T, D, C = head.T, head.D, head.C
    _pack_columns(own.key_panels, qkv, head.qkv + C, 3 * C, T, D)
    _pack_columns(own.value_panels, qkv, head.qkv + 2 * C, 3 * C, T, D)
    _pack_rows(own.queries, qkv, head.qkv, 3 * C, T, D)
    _pack_rows(own.keys, qkv, head.qkv + C, 3 * C, T, D)
    _pack_rows(own.douts, forward.dout, head.out, C, T, D)
    for first in range(begin, T, ROWS):
        last = min(T, first + ROWS)
        if first < end:
            _probabilities(own, forward, head, first, last, Span(0, last))
            _write_dqueries(dqkv, own, head, first, last)
        else:
            _probabilities(own, forward, head, first, last, Span(begin, min(last, end)))
        _add_dkeys_and_dvalues(own, head, first, last, Span(begin, min(last, end)))
    one, D_row = np.float32(1), round_up(D, LANES)
    for t in range(begin, end):
        place = head.qkv + t * 3 * C
        _write_row(dqkv, place + C, own.dkeys, t * D_row, D, one)
        _write_row(dqkv, place + 2 * C, own.dvalues, t * D_row, D, one)


@jit
def _write_dqueries(dqkv, own, head, first, last):
    """dq = ds k, for the queries first..last."""
    D, D_row, T_row = head.D, round_up(head.D, LANES), _score_row(head.T)
    for tile in range(first, last, TILE_ROWS):
        count = min(TILE_ROWS, last - tile)
        for column in range(0, D, PANEL):
            _multiply(
                Rows(at(own.dqueries, column), D_row),
                Strip(at(own.ds, (tile - first) * T_row), TILE_ROWS * T_row, T_row, 1),
                Rows(at(own.keys, column), D_row),
                Extent(count, min(PANEL, D_row - column), min(last, tile + TILE_ROWS)),
            )
        for i in range(count):
            place = head.qkv + (tile + i) * 3 * head.C
            _write_row(dqkv, place, own.dqueries, i * D_row, D, np.float32(1))


@jit
def _add_dkeys_and_dvalues(own, head, first, last, keys):
    """dk += ds^T q, dv += (p mask)^T dout: what the queries first..last add to those of `keys`.

    The first queries that see a key write instead of adding.
    """
    D_row, T_row = round_up(head.D, LANES), _score_row(head.T)
    for tile in range(keys.left, keys.right, TILE_ROWS):
        start = max(first, tile)  # the queries before do not see the tile
        place = (start - first) * T_row + tile
        for column in range(0, head.D, PANEL):
            count, width = min(TILE_ROWS, keys.right - tile), min(PANEL, D_row - column)
            extent = Extent(count, width, last - start)
            dkeys = Rows(at(own.dkeys, tile * D_row + column), D_row)
            dvalues = Rows(at(own.dvalues, tile * D_row + column), D_row)
            source = start * D_row + column
            multiply_panel(
                dkeys,
                Strip(at(own.ds, place), TILE_ROWS, 1, T_row),
                Rows(at(own.queries, source), D_row),
                extent,
                dkeys if tile < first else Rows(NULL, 0),
                NULL,
                NULL,
            )
            multiply_panel(
                dvalues,
                Strip(at(own.p, place), TILE_ROWS, 1, T_row),
                Rows(at(own.douts, source), D_row),
                extent,
                dvalues if tile < first else Rows(NULL, 0),
                NULL,
                NULL,
            )


@jit
def _probabilities(own, forward, head, first, last, keys):
    """Writes p and ds of the queries first..last, with zeros for keys after the query."""
    T, D = head.T, head.D
    D_row, T_row = round_up(D, LANES), _score_row(T)
    scale = np.float32(1 / np.sqrt(D))
    for tile in range(first, last, TILE_ROWS):
        count = min(TILE_ROWS, last - tile)
        seen = min(tile + count, keys.right)
        place = (tile - first) * T_row
        for column in range(keys.left // PANEL * PANEL, seen, PANEL):
            extent = Extent(count, min(PANEL, round_up(seen - column, LANES)), D)
            _multiply(
                Rows(at(own.p, place + column), T_row),
                Strip(at(own.queries, tile * D_row), TILE_ROWS * D_row, D_row, 1),
                Rows(at(own.key_panels, column * D), PANEL),
                extent,
            )
            _multiply(
                Rows(at(own.ds, place + column), T_row),
                Strip(at(own.douts, tile * D_row), TILE_ROWS * D_row, D_row, 1),
                Rows(at(own.value_panels, column * D), PANEL),
                extent,
            )
        for i in range(count):
            row = tile + i
            delta = _dot(forward.dout, forward.out, head.out + row * head.C, D)
            softmax = Softmax(scale, forward.logsumexp[head.logsumexp + row], delta)
            counter = row * T
            columns = Span(keys.left, round_up(keys.right, LANES))
            start = place + i * T_row
            _softmax_backward_row(
                own.p, own.ds, start, row + 1, columns, softmax, forward.mask, counter
            )


class Softmax(NamedTuple):
    """p = exp(score scale - logsumexp) of a row, and delta = the mean of dp under p."""

    scale: np.float32
    logsumexp: np.float32
    delta: np.float32


@jit
def _softmax_backward_row(p, ds, s, count, columns, softmax, mask, counter):
    """Scores in p -> probabilities after dropout; their gradients in ds -> those of the scores.

    Both rows begin at s. Of the columns given, those from count on become zeros.
    """
    zero = broadcast(np.float32(0))
    for j in range(columns.left, min(columns.right, round_up(count, LANES)), LANES):
        probability = exp(load(p, s + j) * softmax.scale - softmax.logsumexp)
        if j + LANES > count:
            probability = keep_first(probability, count - j)
        dprobability, kept = load(ds, s + j), probability
        if mask.threshold > 0:
            factors = dropout_factors(mask.key, counter + j, mask.threshold, mask.factor)
            dprobability, kept = dprobability * factors, probability * factors
        dscore = probability * (dprobability - softmax.delta) * softmax.scale
        store(p, s + j, kept)
        store(ds, s + j, keep_first(dscore, count - j) if j + LANES > count else dscore)
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


@jit
def _pack_columns(panels, x, place, stride, T, D):
    """T rows of D elements -> their transpose as panels (D, PANEL); zeros in the columns past T."""
    for t in range(0, round_up(T, LANES), LANES):
        panel, column = t // PANEL * PANEL * D, t % PANEL
        whole = D - D % LANES if t + LANES <= T else 0
        for d in range(0, whole, LANES):
            transpose_tile(
                at(x, place + t * stride + d), stride, at(panels, panel + d * PANEL + column), PANEL
            )
        for d in range(whole, D):
            for lane in range(LANES):
                inside = t + lane < T
                panels[panel + d * PANEL + column + lane] = (
                    element(x, place + (t + lane) * stride + d) if inside else np.float32(0)
                )


@jit
def _pack_rows(rows, x, place, stride, T, D):
    """T rows of D elements -> the same, contiguous, each padded with zeros to whole vectors."""
    D_row = round_up(D, LANES)
    for t in range(T):
        for d in range(0, D, LANES):
            count = min(LANES, D - d)
            store(rows, t * D_row + d, load_first(x, place + t * stride + d, count))
