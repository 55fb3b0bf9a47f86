"""Causal multi-head attention, fused: scores exist only in blocks of scratch, never as T x T.

QUERIES x KEYS scores at a time are computed. Keys before the documents of all queries are skipped.
For the backward pass only the logarithm of each row's sum of exponentials is kept (Dao et al.
2022).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.attention import products
from smallmind.kernels.attention.layout import (
    KEYS,
    LN_2,
    LOWEST,
    QUERIES,
    QueryPlace,
    Span,
    arguments_of,
    first_key,
    head_at,
    prefetch_head,
    prefetch_rows_to_write,
    row_elements,
    row_of_share,
    seen_keys,
    share_of_rows,
    where_seen,
    write_columns,
    write_row,
)
from smallmind.kernels.codegen.jit import called_jit, inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    LOG2_E,
    at,
    broadcast,
    dropout_factors,
    exp2_normal,
    load,
    log2,
    maximum,
    parts,
    store,
    store_first,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.dropout import Mask, mask_of_head


def attention(out, logsumexp, qkv, key=0, probability=0.0, first_row=0, firsts=None, scale=None):
    masked = key, probability, first_row, firsts
    firsts, drops, shape = arguments_of(qkv, out, logsumexp, *masked, scale)
    products.load(qkv)
    rows = scratch(threads(), sum(_sizes(shape.T, shape.D)))
    _attention(out, logsumexp, qkv, rows, firsts, drops, shape)


@parallel_jit
def _attention(out, logsumexp, qkv, scratch, firsts, drops, shape):
    workers = scratch.shape[0]
    mask = Mask(drops.key[()], drops.threshold, drops.factor)
    first_head = drops.first_row[()] // shape.T * shape.H
    heads, T = shape.B * shape.H, shape.T
    for worker in prange(workers):
        own = parts(at(scratch, worker * scratch.shape[1]), _sizes(T, shape.D))
        begin, end = heads * np.int64(worker), heads * (np.int64(worker) + 1)
        products.begin(at(qkv, 0))
        for index in range(begin // workers, ceil_div(end, workers)):
            # The first and the last head may be shared with the workers before and after. The work
            # of the first n rows grows as the square of n.
            first = row_of_share(T, np.sqrt(max(0, begin - index * workers) / workers))
            last = row_of_share(T, np.sqrt(min(workers, end - index * workers) / workers))
            if first < last:
                head = head_at(index, shape, at(firsts, 0))
                dropped = mask_of_head(mask, first_head + index)
                following = head_at(min(index + 1, heads - 1), shape, at(firsts, 0))
                starts = at(out, 0), at(logsumexp, 0), at(qkv, 0)
                _attention_rows(*starts, head, following, first, last, own, dropped)
        products.end(at(qkv, 0))


class ForwardScratch(NamedTuple):
    """Pointers into the scratch of the forward pass of a head, or the sizes of its parts."""

    keys: Any  # as `products` packs them, as the two below
    values: Any
    queries: Any  # of a block
    scores: Any  # (KEYS, QUERIES): a row per key
    results: Any  # (D, QUERIES)
    rows: Any  # (QUERIES, D), the results in padded rows
    top: Any  # (QUERIES,), the largest scores
    sums: Any  # of the exponentials
    factors: Any  # by which a block of keys scales down the sums before it


@called_jit
def _sizes(T, D):
    all_keys, block = row_elements(T, D), row_elements(QUERIES, D)
    packed, vectors = (all_keys, all_keys, block), (QUERIES, QUERIES, QUERIES)
    return ForwardScratch(*packed, KEYS * QUERIES, block, block, *vectors)


@jit
def _attention_rows(out, logsumexp, qkv, head, following, begin, end, own, mask):
    """Computes the queries begin..end of one head. Takes pointers; prefetches `following`.

    Scores lie transposed, so that all sums over keys are sums of vectors, lane by lane. The results
    of a block of keys are scaled down when a later block has larger scores (Milakov & Gimelshein
    2018).
    """
    D, width, C, D_row = head.D, head.width, head.C, round_up(head.D, LANES)
    scale = head.scale
    unit, block = products.padding_unit(qkv), products.keys_per_block(qkv)
    start = first_key(head, begin) // block * block
    all_keys, all_values = products.pack_keys_and_values(qkv, own, head, start, end)
    for first in range(begin, end, QUERIES):
        count = min(QUERIES, end - first)
        columns, start = round_up(count, LANES), first_key(head, first) // block * block
        stop = start + round_up(first + count - start, unit)
        products.pack_queries(qkv, own, head.queries + first * width, width, count, D)
        prefetch_rows_to_write(out, head.out, C, Span(first, first + count), D)
        for i in range(0, columns, LANES):
            store(own.top, i, broadcast(LOWEST))
            store(own.sums, i, broadcast(np.float32(0)))
        vectors, blocks = columns // LANES, ceil_div(stop - start, block)
        for number in range(blocks):
            left = start + number * block
            keys, adds = Span(left, min(stop, left + block)), left > start
            part = keys, first, columns, D
            products.multiply_queries(qkv, own.scores, all_keys, own.queries, *part)
            for v in range(vectors):
                # Little by little: the CPU waits if too many loads are under way.
                share = share_of_rows(first, count, number * vectors + v, blocks * vectors)
                prefetch_head(qkv, following, share)
                _exponentials(qkv, own, head, first, v * LANES, keys, scale, mask)
            if adds:
                _scale_results(own, columns, D)
            products.multiply_keys(qkv, own.results, all_values, own.scores, *part, adds)
        write_columns(own.rows, D_row, own.results, columns, D)
        for i in range(0, columns, LANES):
            sums, place = load(own.sums, i), head.logsumexp + first + i
            total = load(own.top, i) * scale + log2(sums) * LN_2
            store_first(logsumexp, place, total, min(LANES, count - i))
            store(own.factors, i, np.float32(1) / sums)
        for i in range(count):
            place = head.out + (first + i) * C
            write_row(out, place, own.rows, i * D_row, D, own.factors[i])


@jit
def _exponentials(x, own, head, first, i, keys, scale, mask):
    """The scores of the queries i..i + LANES of a block -> exp((score - top) scale), after dropout.

    In place; zeros where a query does not see a key. Updates top and sums (with the dropped ones),
    and writes the factors. The block begins with the query `first`, the scores with keys.left.
    """
    query, left, zero = first + i, keys.left, broadcast(np.float32(0))
    seen = seen_keys(head, query, keys)
    before = load(own.top, i)
    top = _maximum(own.scores, head, query, i, keys, seen, before)
    scale = broadcast(scale * LOG2_E)
    factor = exp2_normal((before - top) * scale)
    store(own.top, i, top)
    store(own.factors, i, factor)
    # Two sums: an addition has to wait for the one before.
    total, other = load(own.sums, i) * factor, zero
    place = QueryPlace(head, query, i, left)
    for key in range(left, seen.begin, 2):
        products.store_two(x, own.scores, key - left, i, zero, zero)
    for key in range(seen.begin, seen.whole_begin, 2):
        first_e, second_e = _two_masked(x, own.scores, place, key, scale, top, mask)
        total, other = total + first_e, other + second_e
    for key in range(seen.whole_begin, seen.whole_end, 2):
        first_e, second_e = _two_exponentials(x, own.scores, place, key, scale, top, mask, True)
        total, other = total + first_e, other + second_e
    for key in range(seen.whole_end, seen.end, 2):
        first_e, second_e = _two_masked(x, own.scores, place, key, scale, top, mask)
        total, other = total + first_e, other + second_e
    for key in range(seen.end, keys.right, 2):
        products.store_two(x, own.scores, key - left, i, zero, zero)
    store(own.sums, i, total + other)


@inline_jit
def _two_exponentials(x, scores, place, key, scale, top, mask, is_whole):
    """-> the exponentials of a key and the next. Writes them after dropout, returns them before
    it.
    """
    head, query, row = place.head, place.query, key - place.left
    zero = broadcast(np.float32(0))
    here = row * QUERIES + place.i
    first = exp2_normal((load(scores, here) - top) * scale)
    second = exp2_normal((load(scores, here + QUERIES) - top) * scale)
    if not is_whole:
        first = where_seen(first, zero, head, query, key)
        second = where_seen(second, zero, head, query, key + 1)
    kept, kept_too = first, second
    if mask.threshold > 0:
        index, T = query * head.T + key, head.T
        kept = first * dropout_factors(mask.key, index, T, mask.threshold, mask.factor)
        kept_too = second * dropout_factors(mask.key, index + 1, T, mask.threshold, mask.factor)
    products.store_two(x, scores, row, place.i, kept, kept_too)
    return first, second


@jit
def _two_masked(x, scores, place, key, scale, top, mask):
    """Does so for keys hidden from some queries: inlining it would double the code."""
    return _two_exponentials(x, scores, place, key, scale, top, mask, False)


@jit
def _maximum(scores, head, query, i, keys, seen, top):
    """Returns the largest scores of the queries i..i + LANES of a block, and of `top`."""
    low = broadcast(LOWEST)
    for key in range(seen.begin, seen.whole_begin):
        score = load(scores, (key - keys.left) * QUERIES + i)
        top = maximum(where_seen(score, low, head, query, key), top)
    # Four chains: a maximum has to wait for the one before.
    second, third, fourth, key = low, low, low, seen.whole_begin
    while key + 3 < seen.whole_end:
        place = (key - keys.left) * QUERIES + i
        top = maximum(load(scores, place), top)
        second = maximum(load(scores, place + QUERIES), second)
        third = maximum(load(scores, place + 2 * QUERIES), third)
        fourth = maximum(load(scores, place + 3 * QUERIES), fourth)
        key += 4
    for last in range(key, seen.end):
        score = load(scores, (last - keys.left) * QUERIES + i)
        top = maximum(where_seen(score, low, head, query, last), top)
    return maximum(maximum(fourth, third), maximum(second, top))


@jit
def _scale_results(own, columns, D):
    """Multiplies the results by the factors, column by column."""
    for i in range(0, columns, LANES):
        factor = load(own.factors, i)
        for d in range(D):
            place = d * QUERIES + i
            store(own.results, place, load(own.results, place) * factor)
