"""`attention` over few tokens, whole heads at a time: their operands stay in the first-level cache.

Blocks, panels and tiles cost more there than the arithmetic. Scores lie transposed, LANES queries
side by side, and everything else is sums of rows times numbers.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.attention_heads import (
    LN_2,
    LOWEST,
    head_at,
    pack_rows,
    score_scale,
    where_seen,
)
from smallmind.kernels.codegen.jit import called_jit, inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import round_up, row_share
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    LOG2_E,
    at,
    broadcast,
    dropout_factors,
    exp2,
    fma,
    load,
    load_first,
    log2,
    maximum,
    store,
    store_first,
    store_up_to,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.dropout import Mask, mask_of_head

SHORT = 32  # tokens, up to which this is faster


def is_short(T, dtype):
    """True if the functions here are to be used."""
    # In 16 bits the gradient takes the mean under p from the rounded result.
    return T <= SHORT and dtype == np.float32


def scratch_size(T, D):
    """Elements of scratch that a thread needs for windows of T tokens and heads of D channels."""
    return _layout(T, D).size


def short_attention(out, logsumexp, qkv, firsts, drops, shape):
    """`attention` where `is_short`."""
    rows = scratch(threads(), scratch_size(shape.T, shape.D))
    _short_attention(out, logsumexp, qkv, firsts, drops, rows, shape)


def short_attention_backward(dqkv, dout, logsumexp, qkv, firsts, drops, shape):
    """`attention_backward` where `is_short`."""
    rows = scratch(threads(), scratch_size(shape.T, shape.D))
    given = dqkv, dout, logsumexp, qkv, firsts
    _short_attention_backward(*given, drops, rows, shape)


class Scratch(NamedTuple):
    """Pointers into the scratch of a head. Rows (T, D) are float32, padded with zeros."""

    queries: Any
    keys: Any
    values: Any
    douts: Any
    dkeys: Any
    dvalues: Any
    columns: Any  # (D, LANES), of LANES queries
    dout_columns: Any
    p: Any  # (T, LANES), the probabilities of LANES queries: a row per key
    ds: Any  # the gradients of their scores


class Layout(NamedTuple):
    """The sizes of rows, columns and scores, and that of all together."""

    rows: int
    columns: int
    scores: int
    size: int


@called_jit
def _layout(T, D):
    D_row = round_up(D, LANES)
    rows, columns, scores = round_up(T, LANES) * D_row, D_row * LANES, round_up(T, LANES) * LANES
    return Layout(rows, columns, scores, 6 * rows + 2 * columns + 2 * scores)


@jit
def _scratch(scratch, T, D):
    layout = _layout(T, D)
    rows = layout.rows
    columns = at(scratch, 6 * rows)
    scores = at(columns, 2 * layout.columns)
    return Scratch(
        scratch,
        at(scratch, rows),
        at(scratch, 2 * rows),
        at(scratch, 3 * rows),
        at(scratch, 4 * rows),
        at(scratch, 5 * rows),
        columns,
        at(columns, layout.columns),
        scores,
        at(scores, layout.scores),
    )


@parallel_jit
def _short_attention(out, logsumexp, qkv, firsts, drops, scratch, shape):
    mask = Mask(drops.key[()], drops.threshold, drops.factor)
    first_head = drops.first_row[()] // shape.T * shape.H
    workers = scratch.shape[0]
    for worker in prange(workers):
        own = _scratch(at(scratch, worker * scratch.shape[1]), shape.T, shape.D)
        begin, end = row_share(shape.B * shape.H, np.int64(worker), workers)
        for index in range(begin, end):
            head = head_at(index, shape, at(firsts, 0))
            dropped = mask_of_head(mask, first_head + index)
            _forward_head(at(out, 0), at(logsumexp, 0), at(qkv, 0), head, own, dropped)


@parallel_jit
def _short_attention_backward(dqkv, dout, logsumexp, qkv, firsts, drops, scratch, shape):
    mask = Mask(drops.key[()], drops.threshold, drops.factor)
    first_head = drops.first_row[()] // shape.T * shape.H
    workers, shared = scratch.shape[0], shape.H // shape.G
    for worker in prange(workers):
        own = _scratch(at(scratch, worker * scratch.shape[1]), shape.T, shape.D)
        begin, end = row_share(shape.B * shape.G, np.int64(worker), workers)
        for group in range(begin, end):
            for number in range(shared):
                index = group * shared + number
                head = head_at(index, shape, at(firsts, 0))
                dropped = mask_of_head(mask, first_head + index)
                given = at(dout, 0), at(logsumexp, 0), at(qkv, 0)
                turn = Turn(number == 0, number + 1 == shared)
                _backward_head(at(dqkv, 0), *given, head, own, dropped, turn)


class Turn(NamedTuple):
    """Marks the first and the last of the heads that share keys and values."""

    is_first: bool
    is_last: bool


@jit
def _forward_head(out, logsumexp, qkv, head, own, mask):
    """Scores, softmax and results of one head, LANES queries at a time."""
    T, D, D_row = head.T, head.D, round_up(head.D, LANES)
    padded = round_up(T, LANES)
    pack_rows(own.queries, D_row, qkv, head.queries, head.width, T, padded, D)
    pack_rows(own.keys, D_row, qkv, head.keys, head.width, T, padded, D)
    pack_rows(own.values, D_row, qkv, head.values, head.width, T, padded, D)
    scale, zero = score_scale(head), broadcast(np.float32(0))
    for first in range(0, T, LANES):
        last = min(T, first + LANES)
        _transpose_rows(own.columns, own.queries, first, D)
        top = broadcast(LOWEST)
        for key in range(0, last, 4):
            place = key * LANES
            a, b, c, d = _four_dots(own.columns, own.keys, key, D)
            store(own.p, place, a)
            store(own.p, place + LANES, b)
            store(own.p, place + 2 * LANES, c)
            store(own.p, place + 3 * LANES, d)
            top = maximum(where_seen(a, top, head, first, key), top)
            top = maximum(where_seen(b, top, head, first, key + 1), top)
            top = maximum(where_seen(c, top, head, first, key + 2), top)
            top = maximum(where_seen(d, top, head, first, key + 3), top)
        total, factor = zero, broadcast(scale * LOG2_E)
        for key in range(last):
            place = key * LANES
            e = where_seen(exp2((load(own.p, place) - top) * factor), zero, head, first, key)
            total = total + e
            if mask.threshold > 0:
                e = e * _dropout_factors(mask, head, first, key)
            store(own.p, place, e)
        place = head.logsumexp + first
        store_first(logsumexp, place, top * scale + log2(total) * LN_2, last - first)
        store(own.ds, 0, np.float32(1) / total)
        for i in range(0, last - first, 4):
            # No query of the four sees the keys after the last of them.
            end, weights = min(last, first + i + 4), at(own.p, i)
            for column in range(0, D, LANES):
                sums = _four_sums(weights, LANES, 1, at(own.values, column), D_row, 0, end)
                place, count = head.out + (first + i) * head.C + column, min(LANES, D - column)
                store_up_to(out, place, sums[0] * own.ds[i], count)
                if first + i + 1 < last:
                    store_up_to(out, place + head.C, sums[1] * own.ds[i + 1], count)
                if first + i + 2 < last:
                    store_up_to(out, place + 2 * head.C, sums[2] * own.ds[i + 2], count)
                if first + i + 3 < last:
                    store_up_to(out, place + 3 * head.C, sums[3] * own.ds[i + 3], count)


@jit
def _backward_head(dqkv, dout, logsumexp, qkv, head, own, mask, turn):
    """The gradients of one head, LANES queries at a time."""
    # forward: s = q k^T scale, p = exp(s - logsumexp), out = (p mask) v
    # backward, with dp = (dout v^T) mask:
    #   dv = (p mask)^T dout;  ds = p (dp - the mean of dp under p)
    #   dq = ds k scale;  dk = ds^T q scale
    T, D, D_row = head.T, head.D, round_up(head.D, LANES)
    padded = round_up(T, LANES)
    pack_rows(own.queries, D_row, qkv, head.queries, head.width, T, padded, D)
    pack_rows(own.douts, D_row, dout, head.out, head.C, T, padded, D)
    if turn.is_first:
        pack_rows(own.keys, D_row, qkv, head.keys, head.width, T, padded, D)
        pack_rows(own.values, D_row, qkv, head.values, head.width, T, padded, D)
    for first in range(0, T, LANES):
        last = min(T, first + LANES)
        _score_gradients(logsumexp, head, own, mask, first, last)
        _write_dqueries(dqkv, head, own, first, last)
        _add_dkeys_and_dvalues(dqkv, head, own, first, last, turn)


@jit
def _score_gradients(logsumexp, head, own, mask, first, last):
    """The probabilities of the queries first..last, after dropout, and their scores' gradients."""
    D, zero = head.D, broadcast(np.float32(0))
    _transpose_rows(own.columns, own.queries, first, D)
    _transpose_rows(own.dout_columns, own.douts, first, D)
    shift = zero - load_first(logsumexp, head.logsumexp + first, last - first)
    vectors = Vectors(broadcast(score_scale(head)), shift)
    delta = zero  # the mean of dp under p
    for key in range(0, last, 4):
        a, b, c, d = _four_dots(own.columns, own.keys, key, D)
        da, db, dc, dd = _four_dots(own.dout_columns, own.values, key, D)
        delta = _probability(own, head, mask, first, key, vectors, a, da, delta)
        delta = _probability(own, head, mask, first, key + 1, vectors, b, db, delta)
        delta = _probability(own, head, mask, first, key + 2, vectors, c, dc, delta)
        delta = _probability(own, head, mask, first, key + 3, vectors, d, dd, delta)
    for key in range(last):
        place = key * LANES
        p = load(own.p, place)
        ds = p * (load(own.ds, place) - delta)
        store(own.ds, place, where_seen(ds, zero, head, first, key))
        if mask.threshold > 0:
            store(own.p, place, p * _dropout_factors(mask, head, first, key))


class Vectors(NamedTuple):
    """Values common to the scores of LANES queries."""

    scale: Any
    shift: Any  # -logsumexp


@inline_jit
def _probability(own, head, mask, first, key, vectors, score, dp, delta):
    """Writes p and dp of a key -> delta + p dp."""
    # The product with log2(e) comes last: logsumexp may be in the thousands.
    p = exp2(fma(score, vectors.scale, vectors.shift) * LOG2_E)
    p = where_seen(p, broadcast(np.float32(0)), head, first, key)
    if mask.threshold > 0:
        dp = dp * _dropout_factors(mask, head, first, key)
    store(own.p, key * LANES, p)
    store(own.ds, key * LANES, dp)
    return where_seen(fma(p, dp, delta), delta, head, first, key)


@jit
def _write_dqueries(dqkv, head, own, first, last):
    """Writes dq = ds k scale of the queries first..last."""
    D, D_row, width, scale = head.D, round_up(head.D, LANES), head.width, score_scale(head)
    for i in range(0, last - first, 4):
        # No query of the four sees the keys after the last of them.
        end, weights = min(last, first + i + 4), at(own.ds, i)
        for column in range(0, D, LANES):
            sums = _four_sums(weights, LANES, 1, at(own.keys, column), D_row, 0, end)
            place, count = head.queries + (first + i) * width + column, min(LANES, D - column)
            store_up_to(dqkv, place, sums[0] * scale, count)
            if first + i + 1 < last:
                store_up_to(dqkv, place + width, sums[1] * scale, count)
            if first + i + 2 < last:
                store_up_to(dqkv, place + 2 * width, sums[2] * scale, count)
            if first + i + 3 < last:
                store_up_to(dqkv, place + 3 * width, sums[3] * scale, count)


@jit
def _add_dkeys_and_dvalues(dqkv, head, own, first, last, turn):
    """dk += ds^T q, dv += (p mask)^T dout: what the queries first..last add to those they see.

    Writes the sums of the last queries of the last head to dqkv.
    """
    D, D_row, count = head.D, round_up(head.D, LANES), last - first
    one = np.float32(1)
    for key in range(0, last, 4):
        # The queries before the first of the four keys see none of them.
        begin, place = max(0, key - first), key * LANES
        # The first queries that see these keys write.
        adds = not (turn.is_first and key >= first)
        for column in range(0, D, LANES):
            source = first * D_row + column
            rows = Target(key, min(last, key + 4), column, adds, turn.is_last and last == head.T)
            sums = _four_sums(
                at(own.ds, place), 1, LANES, at(own.queries, source), D_row, begin, count
            )
            _put_rows(dqkv, head.keys, own.dkeys, sums, rows, head, score_scale(head))
            sums = _four_sums(
                at(own.p, place), 1, LANES, at(own.douts, source), D_row, begin, count
            )
            _put_rows(dqkv, head.values, own.dvalues, sums, rows, head, one)


class Target(NamedTuple):
    """LANES columns of up to four rows, whether they are added to, and whether they are final."""

    begin: int
    end: int
    column: int
    adds: bool
    is_final: bool


@jit
def _put_rows(dqkv, place, rows, sums, target, head, factor):
    """Four sums -> rows, or times factor to dqkv."""
    row = target.begin
    _put_row(dqkv, place, rows, sums[0], row, target, head, factor)
    if row + 1 < target.end:
        _put_row(dqkv, place, rows, sums[1], row + 1, target, head, factor)
    if row + 2 < target.end:
        _put_row(dqkv, place, rows, sums[2], row + 2, target, head, factor)
    if row + 3 < target.end:
        _put_row(dqkv, place, rows, sums[3], row + 3, target, head, factor)


@inline_jit
def _put_row(dqkv, place, rows, value, row, target, head, factor):
    here = row * round_up(head.D, LANES) + target.column
    if target.adds:
        value = value + load(rows, here)
    if target.is_final:
        there = place + row * head.width + target.column
        store_up_to(dqkv, there, value * factor, min(LANES, head.D - target.column))
    else:
        store(rows, here, value)


@inline_jit
def _dropout_factors(mask, head, first, key):
    """The dropout factors of LANES queries, from the query `first` on, for a key."""
    return dropout_factors(mask.key, first * head.T + key, head.T, mask.threshold, mask.factor)


@jit
def _transpose_rows(columns, rows, first, D):
    """LANES rows from `first` on -> columns (D, LANES)."""
    D_row = round_up(D, LANES)
    for d in range(0, D, LANES):
        transpose_tile(at(rows, first * D_row + d), D_row, at(columns, d * LANES), LANES)


@inline_jit
def _four_dots(columns, rows, row, D):
    """columns (D, LANES) -> the dot products of its columns with four rows from `row` on."""
    D_row = round_up(D, LANES)
    a, b = row * D_row, (row + 1) * D_row
    c, e = (row + 2) * D_row, (row + 3) * D_row
    sums0 = sums1 = sums2 = sums3 = broadcast(np.float32(0))
    for d in range(D):
        column = load(columns, d * LANES)
        sums0 = fma(column, broadcast(rows[a + d]), sums0)
        sums1 = fma(column, broadcast(rows[b + d]), sums1)
        sums2 = fma(column, broadcast(rows[c + d]), sums2)
        sums3 = fma(column, broadcast(rows[e + d]), sums3)
    return sums0, sums1, sums2, sums3


@inline_jit
def _four_sums(weights, step, next_sum, rows, D_row, begin, end):
    """Four sums of LANES columns of the rows begin..end, each with its own weights.

    That of row n in sum m is weights[n * step + m * next_sum].
    """
    sums0 = sums1 = sums2 = sums3 = broadcast(np.float32(0))
    for n in range(begin, end):
        row, place = load(rows, n * D_row), n * step
        sums0 = fma(row, broadcast(weights[place]), sums0)
        sums1 = fma(row, broadcast(weights[place + next_sum]), sums1)
        sums2 = fma(row, broadcast(weights[place + 2 * next_sum]), sums2)
        sums3 = fma(row, broadcast(weights[place + 3 * next_sum]), sums3)
    return sums0, sums1, sums2, sums3
