"""Causal multi-head attention, fused: scores live only in tiles of scratch, never as T x T.

Forward takes TILE_ROWS queries at a time, whose scores against all keys before them fit the cache,
and keeps for the backward pass only the logarithm of each row's sum of exponentials (Dao et al.
2022). Backward computes the probabilities again from it, ROWS queries at a time.
"""

import numpy as np
from numba import prange

from smallmind.kernels.compilation import called_jit, jit, parallel_jit, threads
from smallmind.kernels.dropout import dropout_threshold
from smallmind.kernels.scratch import scratch
from smallmind.kernels.simd import (
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
    round_up,
    store,
    store_first,
    transpose_tile,
)
from smallmind.kernels.tile import PANEL, TILE_ROWS, multiply_panel, null

ROWS = 8 * TILE_ROWS  # queries whose probabilities the backward pass holds at once


def attention(out, logsumexp, qkv, key=0, probability=0.0):
    """qkv (B T, 3 C) -> out (B T, C); keeps logsumexp (B, H, T). Writes out, logsumexp.

    The columns of qkv are queries, keys and values, each of H heads of C / H channels.
    out = dropout(softmax(q k^T / sqrt(D), over the keys not after the query)) v, head by head;
    the dropout mask follows from key (64 bits) and is off at probability 0.
    """
    threshold, factor = dropout_threshold(probability)
    T, D = logsumexp.shape[2], out.shape[1] // logsumexp.shape[1]
    # Keys and values of a head; queries, scores, their sums and results of a tile.
    tile = _rows(2 * TILE_ROWS, D) + TILE_ROWS * (_score_row(T) + 16)
    size = _keys(T, D) + _rows(T, D) + tile
    rows = scratch(threads(), size)
    _attention(out, logsumexp, qkv, np.uint64(key), threshold, factor, rows)


@parallel_jit
def _attention(out, logsumexp, qkv, key, threshold, factor, scratch):
    workers = scratch.shape[0]
    heads = logsumexp.shape[0] * logsumexp.shape[1]
    T, D = logsumexp.shape[2], out.shape[1] // logsumexp.shape[1]
    for worker in prange(workers):
        row, values, scores = scratch[worker], _keys(T, D), _keys(T, D) + _rows(T, D)
        begin, end = heads * np.int64(worker), heads * (np.int64(worker) + 1)
        for head in range(begin // workers, (end + workers - 1) // workers):
            # The first and the last head may be shared with the workers before and after. The work
            # above a row grows as its square.
            first = _row_of_share(T, np.sqrt(max(0, begin - head * workers) / workers))
            last = _row_of_share(T, np.sqrt(min(workers, end - head * workers) / workers))
            if first < last:
                _attention_rows(
                    out, logsumexp, qkv, head, first, last,
                    row[:values], row[values:scores], row[scores:], (key, threshold, factor),
                )  # fmt: skip


@called_jit
def _keys(T, D):
    """Elements of the keys of a head, in panels."""
    return round_up(T, PANEL) * D


@called_jit
def _rows(T, D):
    """Elements of the queries, the keys or the values of a head, in padded rows."""
    return T * round_up(D, LANES)


@called_jit
def _score_row(T):
    """Elements from a row of scores to the next: as a power of two, few sets of the cache."""
    return round_up(T, PANEL) + 16


@jit
def _row_of_share(T, share):
    """The row at a share of T, moved to the nearest border of a block of the backward pass."""
    return T if share >= 1 else min(T, np.int64(share * T + ROWS / 2) // ROWS * ROWS)


@jit
def _attention_rows(out, logsumexp, qkv, head, begin, end, keys, values, scores, mask):
    """The queries begin..end of one head."""
    H, T = logsumexp.shape[1:]
    C = out.shape[1]
    D = C // H
    D_row, T_row = round_up(D, LANES), _score_row(T)
    sums = scores[TILE_ROWS * T_row :]
    queries, result = sums[TILE_ROWS * 16 :], sums[TILE_ROWS * (16 + D_row) :]
    b, h = head // H, head % H
    query = b * T * 3 * C + h * D
    target = b * T * C + h * D
    scale = np.float32(1 / np.sqrt(D))
    _pack_columns(keys, qkv, query + C, 3 * C, end, D)
    _pack_rows(values, qkv, query + 2 * C, 3 * C, end, D)
    for first in range(begin, end, TILE_ROWS):
        rows = min(TILE_ROWS, end - first)
        seen = first + rows
        _pack_rows(queries, qkv, query + first * 3 * C, 3 * C, rows, D)
        for column in range(0, seen, PANEL):
            width = min(PANEL, round_up(seen - column, LANES))
            multiply_panel(
                at(queries, 0), TILE_ROWS * D_row, D_row, 1,
                at(keys, column * D), PANEL, at(scores, column), T_row,
                D, rows, width, null(), 0, null(), null(),
            )  # fmt: skip
        # Step by step for all rows: within a row each waits for the one before.
        for i in range(rows):
            logsumexp[b, h, first + i] = _row_maximum(scores, i * T_row, first + i + 1)
        for i in range(rows):
            counter = (head * T + first + i) * T
            sums[i] = _exponentials(
                scores, i * T_row, first + i + 1, round_up(seen, LANES),
                logsumexp[b, h, first + i], scale, mask, counter,
            )  # fmt: skip
        for column in range(0, D, PANEL):
            multiply_panel(
                at(scores, 0), TILE_ROWS * T_row, T_row, 1, at(values, column), D_row,
                at(result, column), D_row, seen, rows, min(PANEL, D_row - column),
                null(), 0, null(), null(),
            )  # fmt: skip
        for i in range(rows):
            factor = np.float32(1) / sums[i]
            _write_row(out, target + (first + i) * C, result, i * D_row, D, factor)
            m = logsumexp[b, h, first + i]
            logsumexp[b, h, first + i] = m * scale + np.log(sums[i])


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
    """Turns `count` scores from s on into dropped-out exp((score - m) scale), zeros up to width.

    Returns the sum of the exponentials, those included that are dropped.
    """
    key, threshold, factor = mask
    whole = count // LANES * LANES
    tail = count - whole
    total = broadcast(np.float32(0))
    for j in range(0, whole, LANES):
        e = exp((load(scores, s + j) - m) * scale)
        total = total + e
        if threshold > 0:
            e = e * dropout_factors(key, counter + j, threshold, factor)
        store(scores, s + j, e)
    if tail:
        e = keep_first(exp((load(scores, s + whole) - m) * scale), tail)
        total = total + e
        if threshold > 0:
            e = e * dropout_factors(key, counter + whole, threshold, factor)
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


def attention_backward(dqkv, dout, out, logsumexp, qkv, key=0, probability=0.0):
    """dout, out (B T, C), logsumexp (B, H, T), qkv (B T, 3 C) -> dqkv (B T, 3 C). Writes dqkv."""
    threshold, factor = dropout_threshold(probability)
    T, D = logsumexp.shape[2], out.shape[1] // logsumexp.shape[1]
    # Keys and values; queries, keys, gradients of the result, of keys and of values; probabilities
    # and gradients of scores; gradients of a tile of queries.
    size = 2 * _keys(T, D) + 5 * _rows(T, D) + 2 * ROWS * _score_row(T) + _rows(TILE_ROWS, D)
    rows = scratch(threads(), size)
    _attention_backward(dqkv, dout, out, logsumexp, qkv, np.uint64(key), threshold, factor, rows)


@parallel_jit
def _attention_backward(dqkv, dout, out, logsumexp, qkv, key, threshold, factor, scratch):
    workers = scratch.shape[0]
    heads = logsumexp.shape[0] * logsumexp.shape[1]
    T, D = logsumexp.shape[2], out.shape[1] // logsumexp.shape[1]
    for worker in prange(workers):
        own, size = scratch[worker], _keys(T, D)
        columns = own[: 2 * size].reshape(2, size)
        place, size = 2 * size, _rows(T, D)
        rows = own[place : place + 5 * size].reshape(5, size)
        place, size = place + 5 * size, ROWS * _score_row(T)
        tiles = own[place : place + 2 * size].reshape(2, size)
        dqueries = own[place + 2 * size :]
        begin, end = heads * np.int64(worker), heads * (np.int64(worker) + 1)
        for head in range(begin // workers, (end + workers - 1) // workers):
            first = _row_of_share(T, max(0, begin - head * workers) / workers)
            last = _row_of_share(T, min(workers, end - head * workers) / workers)
            if first < last:
                _attention_backward_rows(
                    dqkv, dout, out, logsumexp, qkv, head, first, last,
                    (columns, rows, tiles, dqueries), (key, threshold, factor),
                )  # fmt: skip


@jit
def _attention_backward_rows(
    dqkv, dout, out, logsumexp, qkv, head, begin, end, scratch, mask
):  # fmt: skip
    """The gradients of the queries, keys and values begin..end of one head.

    A worker that has the whole head computes each probability once; one that shares it computes
    those of its queries, and then those of its keys.
    """
    # forward: s = q k^T scale, p = exp(s - logsumexp), out = (p mask) v
    # backward, with dp = (dout v^T) mask and the mean of dp under p, which is dout . out:
    #   dv = (p mask)^T dout;  ds = p (dp - dout . out) scale;  dq = ds k;  dk = ds^T q
    H, T = logsumexp.shape[1:]
    C = out.shape[1]
    D = C // H
    D_row, T_row = round_up(D, LANES), _score_row(T)
    b, h = head // H, head % H
    query = b * T * 3 * C + h * D
    target = b * T * C + h * D
    columns, rows, tiles, dqueries = scratch
    query_rows, key_rows, dout_rows, dkeys, dvalues = rows[0], rows[1], rows[2], rows[3], rows[4]
    p, ds = tiles[0], tiles[1]
    one = np.float32(1)
    _pack_columns(columns[0], qkv, query + C, 3 * C, T, D)
    _pack_columns(columns[1], qkv, query + 2 * C, 3 * C, T, D)
    _pack_rows(query_rows, qkv, query, 3 * C, T, D)
    _pack_rows(key_rows, qkv, query + C, 3 * C, T, D)
    _pack_rows(dout_rows, dout, target, C, T, D)
    for first in range(begin, T, ROWS):
        last = min(T, first + ROWS)
        own_queries = first < end
        left = 0 if own_queries else begin
        _probabilities(
            dout, out, logsumexp, columns, rows, tiles, head,
            (first, last, left, last if own_queries else min(last, end)), mask,
        )  # fmt: skip
        if own_queries:
            for tile in range(first, last, TILE_ROWS):
                count = min(TILE_ROWS, last - tile)
                for column in range(0, D, PANEL):
                    multiply_panel(
                        at(ds, (tile - first) * T_row), TILE_ROWS * T_row, T_row, 1,
                        at(key_rows, column), D_row, at(dqueries, column), D_row,
                        min(last, tile + TILE_ROWS), count, min(PANEL, D_row - column),
                        null(), 0, null(), null(),
                    )  # fmt: skip
                for i in range(count):
                    place = query + (tile + i) * 3 * C
                    _write_row(dqkv, place, dqueries, i * D_row, D, one)
        for tile in range(begin, min(last, end), TILE_ROWS):
            # Queries before the first key of the tile do not see it.
            start = max(first, tile)
            count = min(TILE_ROWS, min(last, end) - tile)
            place = (start - first) * T_row + tile
            for column in range(0, D, PANEL):
                width = min(PANEL, D_row - column)
                dkey, dvalue = at(dkeys, tile * D_row + column), at(dvalues, tile * D_row + column)
                plus_dkey = dkey if tile < first else null()
                plus_dvalue = dvalue if tile < first else null()
                multiply_panel(
                    at(ds, place), TILE_ROWS, 1, T_row,
                    at(query_rows, start * D_row + column), D_row, dkey, D_row,
                    last - start, count, width, plus_dkey, D_row, null(), null(),
                )  # fmt: skip
                multiply_panel(
                    at(p, place), TILE_ROWS, 1, T_row,
                    at(dout_rows, start * D_row + column), D_row, dvalue, D_row,
                    last - start, count, width, plus_dvalue, D_row, null(), null(),
                )  # fmt: skip
    for t in range(begin, end):
        _write_row(dqkv, query + C + t * 3 * C, dkeys, t * D_row, D, one)
        _write_row(dqkv, query + 2 * C + t * 3 * C, dvalues, t * D_row, D, one)


@jit
def _probabilities(dout, out, logsumexp, columns, rows, tiles, head, part, mask):
    """p and ds of the queries first..last and the keys left..right of one head -> tiles.

    The columns of a tile are keys; those that a query does not see become zeros.
    """
    first, last, left, right = part
    H, T = logsumexp.shape[1:]
    C = out.shape[1]
    D = C // H
    D_row, T_row = round_up(D, LANES), _score_row(T)
    b, h = head // H, head % H
    scale = np.float32(1 / np.sqrt(D))
    p, ds = tiles[0], tiles[1]
    for tile in range(first, last, TILE_ROWS):
        count = min(TILE_ROWS, last - tile)
        seen = min(tile + count, right)
        place = (tile - first) * T_row
        for column in range(left // PANEL * PANEL, seen, PANEL):
            width = min(PANEL, round_up(seen - column, LANES))
            multiply_panel(
                at(rows[0], tile * D_row), TILE_ROWS * D_row, D_row, 1,
                at(columns[0], column * D), PANEL, at(p, place + column), T_row,
                D, count, width, null(), 0, null(), null(),
            )  # fmt: skip
            multiply_panel(
                at(rows[2], tile * D_row), TILE_ROWS * D_row, D_row, 1,
                at(columns[1], column * D), PANEL, at(ds, place + column), T_row,
                D, count, width, null(), 0, null(), null(),
            )  # fmt: skip
        for i in range(count):
            row = tile + i
            _softmax_backward_row(
                p, ds, place + i * T_row, row + 1, (left, round_up(right, LANES)), scale,
                logsumexp[b, h, row], _dot(dout, out, (b * T + row) * C + h * D, D),
                mask, (head * T + row) * T,
            )  # fmt: skip


@jit
def _softmax_backward_row(p, ds, s, count, part, scale, logsumexp, delta, mask, counter):
    """Scores in p -> probabilities after dropout; gradients of those in ds -> of the scores.

    In the columns of `part`, of which those from count on become zeros.
    """
    key, threshold, factor = mask
    left, right = part
    zero = broadcast(np.float32(0))
    for j in range(left, min(right, round_up(count, LANES)), LANES):
        probability = exp(load(p, s + j) * scale - logsumexp)
        if j + LANES > count:
            probability = keep_first(probability, count - j)
        dprobability, kept = load(ds, s + j), probability
        if threshold > 0:
            factors = dropout_factors(key, counter + j, threshold, factor)
            dprobability, kept = dprobability * factors, probability * factors
        dscore = probability * (dprobability - delta) * scale
        store(p, s + j, kept)
        store(ds, s + j, keep_first(dscore, count - j) if j + LANES > count else dscore)
    for j in range(max(left, round_up(count, LANES)), right, LANES):
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
