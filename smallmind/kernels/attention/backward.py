"""The backward pass of `attention`, which recomputes its probabilities, block by block."""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.attention import products
from smallmind.kernels.attention.layout import (
    KEYS,
    QUERIES,
    QueryPlace,
    Span,
    arguments_of,
    first_key,
    head_at,
    prefetch_head,
    prefetch_rows,
    prefetch_rows_to_write,
    row_elements,
    row_of_share,
    seen_keys,
    share_of_rows,
    where_seen,
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
    fma,
    load,
    load_first,
    parts,
    store,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.dropout import Mask, mask_of_head


def attention_backward(
    dqkv, dout, out, logsumexp, qkv, key=0, probability=0.0, first_row=0, firsts=None, scale=None
):
    masked = key, probability, first_row, firsts
    firsts, drops, shape = arguments_of(qkv, out, logsumexp, *masked, scale)
    products.load(qkv)
    rows = scratch(threads(), scratch_size(shape.T, shape.D))
    _attention_backward(dqkv, dout, out, logsumexp, qkv, rows, firsts, drops, shape)


def scratch_size(T, D):
    """Elements of scratch that a thread needs for T tokens: more than the forward pass does."""
    return sum(_sizes(T, D))


@parallel_jit
def _attention_backward(dqkv, dout, out, logsumexp, qkv, scratch, firsts, drops, shape):
    workers = scratch.shape[0]
    mask = Mask(drops.key[()], drops.threshold, drops.factor)
    first_head = drops.first_row[()] // shape.T * shape.H
    T, shared = shape.T, shape.H // shape.G
    groups = shape.B * shape.G
    for worker in prange(workers):
        own = parts(at(scratch, worker * scratch.shape[1]), _sizes(T, shape.D))
        begin, end = groups * np.int64(worker), groups * (np.int64(worker) + 1)
        products.begin(at(qkv, 0))
        for group in range(begin // workers, ceil_div(end, workers)):
            first = row_of_share(T, max(0, begin - group * workers) / workers)
            last = row_of_share(T, min(workers, end - group * workers) / workers)
            if first < last:
                for number in range(shared):
                    index = group * shared + number
                    dropped = mask_of_head(mask, first_head + index)
                    forward = Forward(at(dout, 0), at(out, 0), at(logsumexp, 0), dropped)
                    head = head_at(index, shape, at(firsts, 0))
                    following = head_at(min(index + 1, groups * shared - 1), shape, at(firsts, 0))
                    rows = HeadTurn(first, last, number, shared)
                    _attention_backward_rows(
                        at(dqkv, 0), at(qkv, 0), forward, head, following, rows, own
                    )
        products.end(at(qkv, 0))


class HeadTurn(NamedTuple):
    """The rows begin..end of a head, and its number among those that share keys and values."""

    begin: int
    end: int
    number: int
    shared: int


class Forward(NamedTuple):
    """Results of the forward pass that the backward pass needs besides queries, keys and values."""

    dout: Any  # a pointer to the array, as are the two below
    out: Any
    logsumexp: Any
    mask: Mask


class BackwardScratch(NamedTuple):
    """Pointers into the scratch of the backward pass of a head, or the sizes of its parts."""

    keys: Any  # as `products` packs them, as is key_columns
    values: Any
    dkeys: Any  # (T, D) in padded rows, as the one below
    dvalues: Any
    key_columns: Any  # half the size
    queries: Any  # of a block, packed in both ways, as are the gradients of their results
    douts: Any
    query_columns: Any
    dout_columns: Any
    dqueries: Any  # (D, QUERIES)
    p: Any  # (KEYS, QUERIES), the probabilities: a row per key
    ds: Any  # the gradients of the scores
    ds_rows: Any  # half the size
    logsumexp: Any  # (QUERIES,)
    delta: Any


@called_jit
def _sizes(T, D):
    all_keys, block, scores = row_elements(T, D), row_elements(QUERIES, D), KEYS * QUERIES
    keys, blocks = (all_keys, all_keys, all_keys, all_keys), (block, block, block, block, block)
    return BackwardScratch(
        *keys, all_keys // 2, *blocks, scores, scores, scores // 2, QUERIES, QUERIES
    )


@jit
def _attention_backward_rows(dqkv, qkv, forward, head, following, turn, own):
    """Writes the gradients of the queries, keys and values begin..end of one head.

    A worker that owns the whole head computes each probability once; one that shares it computes
    those of its queries, and then those of its keys.
    """
    # forward: s = q k^T scale, p = exp(s - logsumexp), out = (p mask) v
    # backward, with dp = (dout v^T) mask and the mean of dp under p, which is dout . out:
    #   dv = (p mask)^T dout;  ds = p (dp - dout . out) scale;  dq = ds k;  dk = ds^T q
    T, D, width, begin, end = head.T, head.D, head.width, turn.begin, turn.end
    unit, block = products.padding_unit(qkv), products.keys_per_block(qkv)
    is_first = turn.number == 0
    operands = products.pack_head(qkv, dqkv, own, head, is_first)
    for first in range(begin, T, QUERIES):
        last, seen = min(T, first + QUERIES), first_key(head, first)
        if first >= end and seen >= end:
            break  # no later query sees these keys
        columns = round_up(last - first, max(LANES, unit))
        packed = _pack_queries(own, qkv, forward, head, first, last, columns)
        # The gradients of later queries belong to other workers.
        writes = first < end
        seen = seen // block * block
        start, stop = (seen, last) if writes else (max(seen, begin), min(last, end))
        stop = start + round_up(stop - start, unit)
        vectors, blocks = columns // LANES, ceil_div(stop - start, block)
        for number in range(blocks):
            left = start + number * block
            keys = Span(left, min(stop, left + block))
            part = keys, first, columns, D
            products.multiply_queries(qkv, own.p, operands.keys, own.query_columns, *part)
            products.multiply_queries(qkv, own.ds, operands.values, own.dout_columns, *part)
            for v in range(vectors):
                share = first, last - first, number * vectors + v, blocks * vectors
                _prefetch(dqkv, qkv, forward, head, following, share_of_rows(*share))
                _softmax_backward(qkv, own, head, first, v * LANES, keys, forward.mask)
            if writes:
                factors, adds = (operands.key_columns, own.ds), left > start
                products.multiply_keys(qkv, own.dqueries, *factors, *part, adds)
            owned = Span(begin, end)
            _add_dkeys_and_dvalues(qkv, own, head, operands, packed, keys, owned, is_first)
        if writes:
            products.write_dqueries(dqkv, own, head.queries + first * width, width, last - first, D)
    if turn.number + 1 == turn.shared:
        products.write_dkeys_and_dvalues(dqkv, own, head, begin, end)


@jit
def _prefetch(dqkv, qkv, forward, head, following, rows):
    """Prefetches rows that are read of the following head, and written of this one."""
    prefetch_head(qkv, following, rows)
    for x in (forward.dout, forward.out):
        prefetch_rows(x, following.out, head.C, rows, head.D)
    for place in (head.queries, head.keys, head.values):
        prefetch_rows_to_write(dqkv, place, head.width, rows, head.D)


class QueryBlock(NamedTuple):
    """The queries first..last and the gradients of their results, as `pack_both` returns them."""

    queries: Any
    douts: Any
    first: int
    last: int


@jit
def _pack_queries(own, qkv, forward, head, first, last, columns):
    """Packs the queries first..last, the gradients of their results, logsumexp and delta."""
    D, width, C, count = head.D, head.width, head.C, last - first
    queries, outs, spare = head.queries + first * width, head.out + first * C, own.dqueries
    block = QueryBlock(
        products.pack_both(qkv, own.queries, own.query_columns, spare, queries, width, count, D),
        products.pack_both(forward.dout, own.douts, own.dout_columns, spare, outs, C, count, D),
        first,
        last,
    )
    for i in range(0, columns, LANES):
        inside = min(LANES, count - i)
        place = head.logsumexp + first + i
        store(own.logsumexp, i, load_first(forward.logsumexp, place, inside))
        # The mean of dp under p.
        delta = _row_dots(own.p, forward.dout, forward.out, outs + i * C, C, inside, D)
        store(own.delta, i, delta)
    return block


@jit
def _row_dots(spare, a, b, place, stride, rows, count):
    """Returns the dot products of up to LANES rows of two matrices, `count` elements each.

    spare (LANES, LANES) is overwritten.
    """
    for row in range(LANES):
        total = broadcast(np.float32(0))
        for c in range(0, count, LANES):
            n, element = min(LANES, count - c) if row < rows else 0, place + row * stride + c
            total = fma(load_first(a, element, n), load_first(b, element, n), total)
        store(spare, row * LANES, total)
    transpose_tile(spare, LANES, spare, LANES)
    total = load(spare, 0)
    for lane in range(1, LANES):
        total = total + load(spare, lane * LANES)
    return total


@jit
def _softmax_backward(x, own, head, first, i, keys, mask):
    """Computes those of the queries i..i + LANES of a block, which begins with the query `first`.

    Products in p -> probabilities after dropout; the gradients of these in ds -> those of the
    products, before their scale. Zeros where a query does not see a key.
    """
    query, left, zero = first + i, keys.left, broadcast(np.float32(0))
    seen = seen_keys(head, query, keys)
    scale = broadcast(head.scale)
    vectors = Vectors(scale, zero - load(own.logsumexp, i), (zero - load(own.delta, i)) * scale)
    place = QueryPlace(head, query, i, left)
    for key in range(left, seen.begin, 2):
        products.store_gradients(x, own, key - left, i, zero, zero, zero, zero)
    for key in range(seen.begin, seen.whole_begin, 2):
        _two_masked(x, own, place, key, vectors, mask)
    for key in range(seen.whole_begin, seen.whole_end, 2):
        _two_gradients(x, own, place, key, vectors, mask, True)
    for key in range(seen.whole_end, seen.end, 2):
        _two_masked(x, own, place, key, vectors, mask)
    for key in range(seen.end, keys.right, 2):
        products.store_gradients(x, own, key - left, i, zero, zero, zero, zero)


class Vectors(NamedTuple):
    """Values common to the rows of a block."""

    scale: Any
    shift: Any  # -logsumexp
    delta_shift: Any  # -delta scale


@inline_jit
def _two_gradients(x, own, place, key, vectors, mask, is_whole):
    """Writes the probabilities of a key and the next, and the gradients of their products."""
    row = key - place.left
    p, ds = _gradient(own, place, row, key, vectors, mask, is_whole)
    other_p, other_ds = _gradient(own, place, row + 1, key + 1, vectors, mask, is_whole)
    products.store_gradients(x, own, row, place.i, p, other_p, ds, other_ds)


@jit
def _two_masked(x, own, place, key, vectors, mask):
    """Does so for keys hidden from some queries: inlining it would double the code."""
    _two_gradients(x, own, place, key, vectors, mask, False)


@inline_jit
def _gradient(own, place, row, key, vectors, mask, is_whole):
    head, query, here = place.head, place.query, row * QUERIES + place.i
    # The product with log2(e) comes last: logsumexp may be in the thousands.
    p = exp2_normal(fma(load(own.p, here), vectors.scale, vectors.shift) * LOG2_E)
    dp = load(own.ds, here)
    zero = broadcast(np.float32(0))
    if not is_whole:
        p = where_seen(p, zero, head, query, key)
    kept = p
    if mask.threshold > 0:
        index = query * head.T + key
        factors = dropout_factors(mask.key, index, head.T, mask.threshold, mask.factor)
        dp, kept = dp * factors, p * factors
    ds = p * fma(dp, vectors.scale, vectors.delta_shift)
    if not is_whole:
        ds = where_seen(ds, zero, head, query, key)
    return kept, ds


@jit
def _add_dkeys_and_dvalues(x, own, head, operands, block, keys, owned, is_first):
    """Adds dk += ds^T q, dv += (p mask)^T dout: what a block's queries add to those of `keys`.

    Only to keys that are `owned`. The first queries that see a key, of the first head that shares
    it, write instead of adding.
    """
    left, right, D = max(keys.left, owned.left), min(keys.right, owned.right), head.D
    first, last = block.first, block.last
    # All queries may see the keys before them.
    diagonal = max(left, min(right, first))
    if left < diagonal:
        end = _last_query(head, first, last, diagonal - 1)
        rows, queries = Span(left, diagonal), Span(first, end)
        products.add_to_keys(x, own, operands, block, D, first, keys.left, rows, queries, False)
    height = products.keys_per_tile(x)
    for tile in range(diagonal, right, height):
        rows = Span(tile, min(right, tile + height))
        end = _last_query(head, first, last, rows.right - 1)
        queries = Span(tile, end)
        products.add_to_keys(x, own, operands, block, D, first, keys.left, rows, queries, is_first)


@jit
def _last_query(head, first, last, key):
    """Returns the end of the queries, of first..last, that see a key or one before it."""
    if head.firsts_step == 0:
        return last
    while last > first and first_key(head, last - 1) > key:
        last -= 1
    return last
