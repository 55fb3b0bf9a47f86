"""`attention` over few tokens, whole heads at a time: their operands stay in the first-level cache.

Blocks, panels and tiles cost more there than the arithmetic. Scores lie transposed, LANES queries
side by side, and everything else is sums of rows times numbers.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.attention.layout import (
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
    parts,
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
    return sum(_sizes(T, D))


def working_memory(shape):
    """Scratch for both passes, a row for each thread."""
    return scratch(threads(), scratch_size(shape.T, shape.D))


class Scratch(NamedTuple):
    """Pointers into the scratch of a head, or sizes. Rows (T, D) are float32, padded with zeros."""

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


@called_jit
def _sizes(T, D):
    D_row = round_up(D, LANES)
    rows, columns, scores = round_up(T, LANES) * D_row, D_row * LANES, round_up(T, LANES) * LANES
    return Scratch(rows, rows, rows, rows, rows, rows, columns, columns, scores, scores)


@parallel_jit
def short_attention(out, logsumexp, qkv, scratch, firsts, drops, shape):
    """`attention` where `is_short`. scratch is the `working_memory`; then see `arguments_of`."""
    workers = scratch.shape[0]
    mask = Mask(drops.key[()], drops.threshold, drops.factor)
    first_head = drops.first_row[()] // shape.T * shape.H
    for worker in prange(workers):
        own = parts(at(scratch, worker * scratch.shape[1]), _sizes(shape.T, shape.D))
        begin, end = row_share(shape.B * shape.H, np.int64(worker), workers)
        for index in range(begin, end):
            head = head_at(index, shape, at(firsts, 0))
            dropped = mask_of_head(mask, first_head + index)
            _forward_head(at(out, 0), at(logsumexp, 0), at(qkv, 0), head, own, dropped)


@parallel_jit
def short_attention_backward(dqkv, dout, logsumexp, qkv, scratch, firsts, drops, shape):
    """`attention_backward` where `is_short`."""
    workers, shared = scratch.shape[0], shape.H // shape.G
    mask = Mask(drops.key[()], drops.threshold, drops.factor)
    first_head = drops.first_row[()] // shape.T * shape.H
    for worker in prange(workers):
        own = parts(at(scratch, worker * scratch.shape[1]), _sizes(shape.T, shape.D))
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
                place = head.out + (first + i) * head.C + column
                target = Target(place, head.C, last - first - i, min(LANES, D - column))
                a, b = sums[0] * own.ds[i], sums[1] * own.ds[i + 1]
                _store_rows(out, target, (a, b, sums[2] * own.ds[i + 2], sums[3] * own.ds[i + 3]))


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
            place = head.queries + (first + i) * width + column
            target = Target(place, width, last - first - i, min(LANES, D - column))
            _store_rows(dqkv, target, _times(sums, scale))


@jit
def _add_dkeys_and_dvalues(dqkv, head, own, first, last, turn):
    """dk += ds^T q, dv += (p mask)^T dout: what the queries first..last add to those they see.

    Writes the sums of the last queries of the last head to dqkv.
    """
    D, D_row, count = head.D, round_up(head.D, LANES), last - first
    for key in range(0, last, 4):
        # The queries before the first of the four keys see none of them.
        begin, place = max(0, key - first), key * LANES
        # The first queries that see these keys write.
        adds = not (turn.is_first and key >= first)
        kept = Kept(D_row, adds, turn.is_last and last == head.T)
        for column in range(0, D, LANES):
            source, here = first * D_row + column, key * D_row + column
            out = key * head.width + column
            rows, columns = last - key, min(LANES, D - column)
            queries, douts = at(own.queries, source), at(own.douts, source)
            sums = _four_sums(at(own.ds, place), 1, LANES, queries, D_row, begin, count)
            target = Target(head.keys + out, head.width, rows, columns)
            _put_rows(dqkv, target, at(own.dkeys, here), kept, sums, score_scale(head))
            sums = _four_sums(at(own.p, place), 1, LANES, douts, D_row, begin, count)
            target = Target(head.values + out, head.width, rows, columns)
            _put_rows(dqkv, target, at(own.dvalues, here), kept, sums, np.float32(1))


class Kept(NamedTuple):
    """The stride of padded rows of sums, whether they are added to, and whether that is final."""

    stride: int
    adds: bool
    is_final: bool


@jit
def _put_rows(out, target, rows, kept, sums, factor):
    """Four sums -> padded rows, or times factor to the target in `out`."""
    stride = kept.stride
    if kept.adds:
        # Rows past the last token are padding.
        a, b, c = load(rows, 0), load(rows, stride), load(rows, 2 * stride)
        sums = sums[0] + a, sums[1] + b, sums[2] + c, sums[3] + load(rows, 3 * stride)
    if kept.is_final:
        _store_rows(out, target, _times(sums, factor))
    else:
        _store_rows(rows, Target(0, stride, 4, LANES), sums)


@inline_jit
def _times(sums, factor):
    return sums[0] * factor, sums[1] * factor, sums[2] * factor, sums[3] * factor


class Target(NamedTuple):
    """Up to LANES columns of up to four rows, from `place` on."""

    place: int
    stride: int
    rows: int
    columns: int


@inline_jit
def _store_rows(out, target, values):
    """Writes as many of four vectors as there are rows."""
    place, stride, rows, columns = target
    store_up_to(out, place, values[0], columns)
    if rows > 1:
        store_up_to(out, place + stride, values[1], columns)
    if rows > 2:
        store_up_to(out, place + 2 * stride, values[2], columns)
    if rows > 3:
        store_up_to(out, place + 3 * stride, values[3], columns)


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
