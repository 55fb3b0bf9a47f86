"""Causal multi-head attention, fused: scores exist only in blocks of scratch, never as T x T.

QUERIES x KEYS scores at a time are computed. Keys before the documents of all queries are skipped.
For the backward pass only the logarithm of each row's sum of exponentials is kept (Dao et al.
2022).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.attention_heads import (
    KEYS,
    QUERIES,
    Span,
    attention_shape,
    first_key,
    first_keys,
    head_at,
    multiply_keys,
    multiply_queries,
    pack_columns,
    pack_rows,
    row_elements,
    row_of_share,
    seen_keys,
    where_seen,
    write_columns,
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
    load,
    maximum,
    store,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.dropout import Mask, dropout_threshold, mask_of_head

LOWEST = np.finfo(np.float32).min


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
        own = _forward_scratch(at(scratch, worker * scratch.shape[1]), T, shape.D)
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


class ForwardScratch(NamedTuple):
    """Pointers into the scratch of the forward pass of a head."""

    keys: Any  # (T, D) in padded rows
    values: Any
    queries: Any  # (D, QUERIES) in panels
    scores: Any  # (KEYS, QUERIES): a row per key
    results: Any  # (D, QUERIES)
    rows: Any  # (QUERIES, D), the results in padded rows
    top: Any  # (QUERIES,), the largest scores
    sums: Any  # of the exponentials
    factors: Any  # by which a block of keys scales down the sums before it


class ForwardLayout(NamedTuple):
    """Where each of them begins, after the keys at 0."""

    values: int
    queries: int
    scores: int
    results: int
    rows: int
    vectors: int
    size: int


@called_jit
def _forward_layout(T, D):
    all_keys, block = row_elements(T, D), row_elements(QUERIES, D)
    queries = 2 * all_keys
    scores = queries + block
    results = scores + KEYS * QUERIES
    rows = results + block
    vectors = rows + block
    return ForwardLayout(all_keys, queries, scores, results, rows, vectors, vectors + 3 * QUERIES)


@jit
def _forward_scratch(scratch, T, D):
    layout = _forward_layout(T, D)
    return ForwardScratch(
        scratch,
        at(scratch, layout.values),
        at(scratch, layout.queries),
        at(scratch, layout.scores),
        at(scratch, layout.results),
        at(scratch, layout.rows),
        at(scratch, layout.vectors),
        at(scratch, layout.vectors + QUERIES),
        at(scratch, layout.vectors + 2 * QUERIES),
    )


@jit
def _attention_rows(out, logsumexp, qkv, head, begin, end, own, mask):
    """The queries begin..end of one head. Takes pointers to the arrays.

    Scores lie transposed, so that all sums over keys are sums of vectors, lane by lane. The results
    of a block of keys are scaled down when a later block has larger scores (Milakov & Gimelshein
    2018).
    """
    D, width = head.D, head.width
    D_row = round_up(D, LANES)
    scale = np.float32(1 / np.sqrt(D))
    start = first_key(head, begin)
    pack_rows(at(own.keys, start * D_row), qkv, head.keys + start * width, width, end - start, D)
    pack_rows(
        at(own.values, start * D_row), qkv, head.values + start * width, width, end - start, D
    )
    for first in range(begin, end, QUERIES):
        count = min(QUERIES, end - first)
        columns, start = round_up(count, LANES), first_key(head, first)
        pack_columns(own.queries, qkv, head.queries + first * width, width, count, D)
        for i in range(0, columns, LANES):
            store(own.top, i, broadcast(LOWEST))
            store(own.sums, i, broadcast(np.float32(0)))
        for left in range(start, first + count, KEYS):
            keys = Span(left, min(first + count, left + KEYS))
            multiply_queries(own.scores, own.keys, own.queries, keys, first, columns, D)
            for i in range(0, columns, LANES):
                _exponentials(own, head, first, i, keys, scale, mask)
            if left > start:
                _scale_results(own, columns, D)
            multiply_keys(
                own.results, own.values, own.scores, keys, first, columns, D, left > start
            )
        write_columns(own.rows, own.results, columns, D)
        for i in range(count):
            factor, row = np.float32(1) / own.sums[i], first + i
            write_row(out, head.out + row * head.C, own.rows, i * D_row, D, factor)
            logsumexp[head.logsumexp + row] = own.top[i] * scale + np.log(own.sums[i])


@jit
def _exponentials(own, head, first, i, keys, scale, mask):
    """The scores of the queries i..i + LANES of a block -> exp((score - top) scale), after dropout.

    In place; zeros where a query does not see a key. Updates top and sums (with the dropped ones),
    and writes the factors. The block begins with the query `first`, the scores with keys.left.
    """
    query, zero = first + i, broadcast(np.float32(0))
    seen = seen_keys(head, query, keys)
    before = load(own.top, i)
    top = _maximum(own.scores, head, query, i, keys, seen, before)
    factor = exp((before - top) * scale)
    store(own.top, i, top)
    store(own.factors, i, factor)
    total = load(own.sums, i) * factor
    for key in range(keys.left, seen.begin):
        store(own.scores, (key - keys.left) * QUERIES + i, zero)
    for key in range(seen.begin, seen.end):
        place = (key - keys.left) * QUERIES + i
        score = load(own.scores, place)
        is_whole = seen.whole_begin <= key < seen.whole_end
        if not is_whole:
            score = where_seen(score, top, head, query, key)
        e = exp((score - top) * scale)
        if not is_whole:
            e = where_seen(e, zero, head, query, key)
        total = total + e
        if mask.threshold > 0:
            place_in_head = query * head.T + key
            e = e * dropout_factors(mask.key, place_in_head, head.T, mask.threshold, mask.factor)
        store(own.scores, place, e)
    for key in range(seen.end, keys.right):
        store(own.scores, (key - keys.left) * QUERIES + i, zero)
    store(own.sums, i, total)


@jit
def _maximum(scores, head, query, i, keys, seen, top):
    """The largest scores of the queries i..i + LANES of a block, and of `top`."""
    low = broadcast(LOWEST)
    for key in range(seen.begin, seen.whole_begin):
        score = load(scores, (key - keys.left) * QUERIES + i)
        top = maximum(where_seen(score, low, head, query, key), top)
    # Two chains: a maximum has to wait for the one before.
    other, key = low, seen.whole_begin
    while key + 1 < seen.whole_end:
        place = (key - keys.left) * QUERIES + i
        top = maximum(load(scores, place), top)
        other = maximum(load(scores, place + QUERIES), other)
        key += 2
    for last in range(key, seen.end):
        score = load(scores, (last - keys.left) * QUERIES + i)
        top = maximum(where_seen(score, low, head, query, last), top)
    return maximum(other, top)


@jit
def _scale_results(own, columns, D):
    """results *= factors, column by column."""
    for i in range(0, columns, LANES):
        factor = load(own.factors, i)
        for d in range(D):
            place = d * QUERIES + i
            store(own.results, place, load(own.results, place) * factor)
