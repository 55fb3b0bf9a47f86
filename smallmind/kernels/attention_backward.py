"""The backward pass of `attention`, which recomputes its probabilities, block by block."""

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
    fma,
    lane_sum,
    load,
    load_first,
    store,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.dropout import Mask, dropout_threshold, mask_of_head
from smallmind.kernels.gemm.tile import NULL, PANEL, TILE_ROWS, Extent, Rows, Strip, multiply_panel


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

    keys: Any  # (T, D) in padded rows, as the three below
    values: Any
    dkeys: Any
    dvalues: Any
    queries: Any  # of a block: (QUERIES, D) in padded rows, as the one below
    douts: Any
    query_panels: Any  # the same (D, QUERIES) in panels
    dout_panels: Any
    dqueries: Any  # (D, QUERIES)
    p: Any  # (KEYS, QUERIES), the probabilities: a row per key
    ds: Any  # the gradients of the scores
    logsumexp: Any  # (QUERIES,)
    delta: Any


class BackwardLayout(NamedTuple):
    """The sizes of these parts in groups, and that of all together."""

    all_keys: int
    block: int
    scores: int
    size: int


@called_jit
def _backward_layout(T, D):
    all_keys, block, scores = row_elements(T, D), row_elements(QUERIES, D), KEYS * QUERIES
    return BackwardLayout(
        all_keys, block, scores, 4 * all_keys + 5 * block + 2 * scores + 2 * QUERIES
    )


@jit
def _backward_scratch(scratch, T, D):
    layout = _backward_layout(T, D)
    block = at(scratch, 4 * layout.all_keys)
    scores = at(block, 5 * layout.block)
    vectors = at(scores, 2 * layout.scores)
    return BackwardScratch(
        scratch,
        at(scratch, layout.all_keys),
        at(scratch, 2 * layout.all_keys),
        at(scratch, 3 * layout.all_keys),
        block,
        at(block, layout.block),
        at(block, 2 * layout.block),
        at(block, 3 * layout.block),
        at(block, 4 * layout.block),
        scores,
        at(scores, layout.scores),
        vectors,
        at(vectors, QUERIES),
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
        pack_rows(own.keys, qkv, head.keys, width, T, D)
        pack_rows(own.values, qkv, head.values, width, T, D)
    for first in range(begin, T, QUERIES):
        last, seen = min(T, first + QUERIES), first_key(head, first)
        if first >= end and seen >= end:
            break  # no later query sees these keys
        _pack_queries(own, qkv, forward, head, first, last)
        # The gradients of later queries belong to other workers.
        writes = first < end
        start, stop = (seen, last) if writes else (max(seen, begin), min(last, end))
        for left in range(start, stop, KEYS):
            keys = Span(left, min(stop, left + KEYS))
            _probabilities(own, forward, head, first, last, keys)
            if writes:
                columns = round_up(last - first, LANES)
                arguments = own.dqueries, own.keys, own.ds, keys, first, columns, D
                multiply_keys(*arguments, left > start)
            _add_dkeys_and_dvalues(own, head, first, last, keys, Span(begin, end), is_first)
        if writes:
            _write_dqueries(dqkv, own, head, first, last)
    if turn.number + 1 < turn.shared:
        return
    one, D_row = np.float32(1), round_up(D, LANES)
    for t in range(begin, end):
        write_row(dqkv, head.keys + t * width, own.dkeys, t * D_row, D, one)
        write_row(dqkv, head.values + t * width, own.dvalues, t * D_row, D, one)


@jit
def _pack_queries(own, qkv, forward, head, first, last):
    """Packs the queries first..last, the gradients of their results, logsumexp and delta."""
    D, width, C, count = head.D, head.width, head.C, last - first
    queries, outs = head.queries + first * width, head.out + first * C
    pack_rows(own.queries, qkv, queries, width, count, D)
    pack_columns(own.query_panels, qkv, queries, width, count, D)
    pack_rows(own.douts, forward.dout, outs, C, count, D)
    pack_columns(own.dout_panels, forward.dout, outs, C, count, D)
    for i in range(round_up(count, LANES)):
        is_inside = i < count
        own.logsumexp[i] = (
            forward.logsumexp[head.logsumexp + first + i] if is_inside else np.float32(0)
        )
        # The mean of dp under p.
        own.delta[i] = (
            _dot(forward.dout, forward.out, outs + i * C, D) if is_inside else np.float32(0)
        )


@jit
def _probabilities(own, forward, head, first, last, keys):
    """Writes p and ds of the queries first..last for a block of keys: zeros where not seen."""
    D, columns = head.D, round_up(last - first, LANES)
    multiply_queries(own.p, own.keys, own.query_panels, keys, first, columns, D)
    multiply_queries(own.ds, own.values, own.dout_panels, keys, first, columns, D)
    for i in range(0, columns, LANES):
        _softmax_backward(own, head, first, i, keys, forward.mask)


@jit
def _softmax_backward(own, head, first, i, keys, mask):
    """The queries i..i + LANES of a block, which begins with the query `first`.

    Scores in p -> probabilities after dropout; their gradients in ds -> those of the scores.
    """
    query, zero = first + i, broadcast(np.float32(0))
    scale = np.float32(1 / np.sqrt(head.D))
    seen = seen_keys(head, query, keys)
    logsumexp, delta = load(own.logsumexp, i), load(own.delta, i)
    for key in range(keys.left, seen.begin):
        place = (key - keys.left) * QUERIES + i
        store(own.p, place, zero)
        store(own.ds, place, zero)
    for key in range(seen.begin, seen.end):
        place = (key - keys.left) * QUERIES + i
        probability, dprobability = exp(load(own.p, place) * scale - logsumexp), load(own.ds, place)
        is_whole = seen.whole_begin <= key < seen.whole_end
        if not is_whole:
            probability = where_seen(probability, zero, head, query, key)
        kept = probability
        if mask.threshold > 0:
            place_in_head = query * head.T + key
            factors = dropout_factors(mask.key, place_in_head, head.T, mask.threshold, mask.factor)
            dprobability, kept = dprobability * factors, probability * factors
        dscore = probability * (dprobability - delta) * scale
        if not is_whole:
            dscore = where_seen(dscore, zero, head, query, key)
        store(own.p, place, kept)
        store(own.ds, place, dscore)
    for key in range(seen.end, keys.right):
        place = (key - keys.left) * QUERIES + i
        store(own.p, place, zero)
        store(own.ds, place, zero)


@jit
def _add_dkeys_and_dvalues(own, head, first, last, keys, owned, is_first):
    """dk += ds^T q, dv += (p mask)^T dout: what the queries first..last add to those of `keys`.

    Only to keys that are `owned`. The first queries that see a key, of the first head that shares
    it, write instead of adding.
    """
    left, right = max(keys.left, owned.left), min(keys.right, owned.right)
    # All queries may see the keys before them.
    diagonal = max(left, min(right, first))
    if left < diagonal:
        end = _last_query(head, first, last, diagonal - 1)
        rows, queries = Span(left, diagonal), Span(first, end)
        _add_to_keys(own, head.D, first, keys.left, rows, queries, False)
    for tile in range(diagonal, right, TILE_ROWS):
        rows = Span(tile, min(right, tile + TILE_ROWS))
        end = _last_query(head, first, last, rows.right - 1)
        _add_to_keys(own, head.D, first, keys.left, rows, Span(tile, end), is_first)


@jit
def _last_query(head, first, last, key):
    """The end of the queries, of first..last, that see a key or one before it."""
    if head.firsts_step == 0:
        return last
    while last > first and first_key(head, last - 1) > key:
        last -= 1
    return last


@jit
def _add_to_keys(own, D, first, left, keys, queries, writes):
    """Adds the products of some queries to dk and dv of some keys, or writes them.

    The rows of p and ds begin with the key `left`, their columns with the query `first`.
    """
    D_row, source = round_up(D, LANES), queries.left - first
    place = (keys.left - left) * QUERIES + source
    for column in range(0, D_row, PANEL):
        extent = Extent(
            keys.right - keys.left, min(PANEL, D_row - column), queries.right - queries.left
        )
        dkeys = Rows(at(own.dkeys, keys.left * D_row + column), D_row)
        dvalues = Rows(at(own.dvalues, keys.left * D_row + column), D_row)
        multiply_panel(
            dkeys,
            Strip(at(own.ds, place), TILE_ROWS * QUERIES, QUERIES, 1),
            Rows(at(own.queries, source * D_row + column), D_row),
            extent,
            Rows(NULL, 0) if writes else dkeys,
            NULL,
            NULL,
        )
        multiply_panel(
            dvalues,
            Strip(at(own.p, place), TILE_ROWS * QUERIES, QUERIES, 1),
            Rows(at(own.douts, source * D_row + column), D_row),
            extent,
            Rows(NULL, 0) if writes else dvalues,
            NULL,
            NULL,
        )


@jit
def _write_dqueries(dqkv, own, head, first, last):
    """Writes dq = ds k of the queries first..last. Overwrites what was packed of them."""
    D, D_row = head.D, round_up(head.D, LANES)
    write_columns(own.queries, own.dqueries, round_up(last - first, LANES), D)
    for i in range(last - first):
        place = head.queries + (first + i) * head.width
        write_row(dqkv, place, own.queries, i * D_row, D, np.float32(1))


@jit
def _dot(a, b, place, count):
    """The dot product of the same `count` elements of two matrices."""
    total = broadcast(np.float32(0))
    for c in range(0, count, LANES):
        n = min(LANES, count - c)
        total = fma(load_first(a, place + c, n), load_first(b, place + c, n), total)
    return lane_sum(total)
