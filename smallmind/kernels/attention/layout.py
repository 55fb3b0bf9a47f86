"""Code common to the passes of attention: where heads are in the arrays, and their packing."""

from typing import Any, NamedTuple

import numpy as np

from smallmind.kernels.codegen.jit import called_jit, inline_jit, jit
from smallmind.kernels.codegen.rounding import round_up
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    broadcast,
    first_or,
    line_elements,
    load,
    load_first,
    prefetch,
    prefetch_to_write,
    store,
    store_first,
)
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.dropout import drops

# Queries and, at most, keys whose scores are computed at a time: they stay in the first cache.
QUERIES = 64
KEYS = 64
LN_2 = np.float32(np.log(2))
LOWEST = np.finfo(np.float32).min
_ONE_DOCUMENT = np.zeros((1, 1), np.int32)  # all queries see the first key


class AttentionShape(NamedTuple):
    """The sizes of an attention: H heads of queries in G groups, each with its keys and values."""

    B: int
    T: int
    H: int
    G: int
    D: int
    has_documents: bool
    scale: np.float32  # of the products of queries and keys


def attention_shape(qkv, out, logsumexp, firsts, scale):
    """qkv (B T, (H + 2 G) D), out (B T, H D), logsumexp (B, H, T) -> their sizes.

    And whether there are firsts (B, T), and the scale of scores.
    """
    B, H, T = logsumexp.shape
    D = out.shape[1] // H
    G = (qkv.shape[1] // D - H) // 2
    return AttentionShape(B, T, H, G, D, firsts is not None, score_scale(scale, D))


def score_scale(scale, D):
    """Returns the scale of scores, by default 1 / sqrt(D)."""
    return np.float32(1 / np.sqrt(D) if scale is None else scale)


def arguments_of(qkv, out, logsumexp, key, probability, first_row, firsts, scale):
    """The arguments of `attention` -> those of the compiled passes, besides arrays and scratch.

    The first key that each query sees, Drops and the Shape.
    """
    shape = attention_shape(qkv, out, logsumexp, firsts, scale)
    # An array in any case: kernels are compiled for one type only.
    firsts = _ONE_DOCUMENT if firsts is None else firsts
    return firsts, drops(key, probability, first_row), shape


class HeadIndices(NamedTuple):
    """One head of one sequence, and where it begins in the arrays. All indices are flat."""

    T: int
    D: int
    width: int  # of qkv
    C: int  # of out
    queries: int  # in qkv (B T, width), as the two below
    keys: int
    values: int
    out: int  # in out (B T, C)
    logsumexp: int  # in logsumexp (B, H, T)
    firsts: Any  # a pointer to the first key that each query sees
    firsts_step: int  # between those of two queries; 0: the same for all
    scale: np.float32  # of the products of queries and keys


@jit
def row_of_share(T, share):
    """Returns the row at a share of T, moved to the nearest multiple of QUERIES."""
    return T if share >= 1 else min(T, np.int64(share * T + QUERIES / 2) // QUERIES * QUERIES)


@jit
def head_at(index, shape, firsts):
    """Returns the head with this number, counted over the queries of all sequences.

    firsts is a pointer to the array.
    """
    T, H, G, D = shape.T, shape.H, shape.G, shape.D
    b, h = index // H, index % H
    width, C, group = (H + 2 * G) * D, H * D, h // (H // G)
    row = b * T * width
    keys = row + C + group * D
    step = 1 if shape.has_documents else 0
    return HeadIndices(
        T,
        D,
        width,
        C,
        row + h * D,
        keys,
        keys + G * D,
        b * T * C + h * D,
        index * T,
        at(firsts, b * T * step),
        step,
        shape.scale,
    )


@inline_jit
def first_key(head, query):
    """Returns the first key that a query sees. It never decreases from one query to the next."""
    return np.int64(head.firsts[query * head.firsts_step])


class HeadOperands(NamedTuple):
    """The keys and values of a head as products take them, and where their gradients are added."""

    keys: Any
    key_columns: Any
    values: Any
    dkeys: Any
    dvalues: Any


class Span(NamedTuple):
    """The keys, rows or columns left..right."""

    left: int
    right: int


class QueryPlace(NamedTuple):
    """LANES queries, from `query` on, in column i on of rows from the key `left` on."""

    head: Any
    query: int
    i: int
    left: int


class SeenKeys(NamedTuple):
    """The part of a span of keys that some of LANES queries see, and the part that all of them see.

    All are even numbers of keys after the first of the span.
    """

    begin: int
    whole_begin: int
    whole_end: int
    end: int


@jit
def seen_keys(head, query, keys):
    """-> the keys seen by LANES queries from this one on, in pairs from the first of the span
    on.
    """
    first = keys.left
    begin = min(keys.right, max(first, first_key(head, min(query, head.T - 1))))
    end = max(begin, min(keys.right, query + LANES))
    last = min(query + LANES, head.T) - 1
    whole_begin = first + round_up(min(end, max(begin, first_key(head, last))) - first, 2)
    whole_end = first + (min(keys.right, query + 1) - first) // 2 * 2
    return SeenKeys(
        first + (begin - first) // 2 * 2,
        whole_begin,
        max(whole_begin, whole_end),
        first + round_up(end - first, 2),
    )


@jit
def where_seen(value, otherwise, head, query, key):
    """Keeps value in lanes of the queries from `query` on that see the key, else `otherwise`."""
    value = first_or(otherwise, key - query, value)
    if head.firsts_step > 0:
        count = 0
        while count < min(LANES, head.T - query) and first_key(head, query + count) <= key:
            count += 1
        value = first_or(value, count, otherwise)
    return value


@called_jit
def row_elements(rows, D):
    """Elements of as many queries, keys or values of a head, in padded rows and columns."""
    return round_up(rows, KEYS) * round_up(D, LANES)


@jit
def write_columns(rows, stride, x, width, D):
    """x (D, QUERIES) -> its first `width` columns as rows, padded to whole vectors."""
    for d in range(0, D, LANES):
        for i in range(0, width, LANES):
            transpose_tile(at(x, d * QUERIES + i), QUERIES, at(rows, i * stride + d), stride)


@jit
def write_packed_keys(dqkv, own, head, begin, end):
    """Writes dk and dv of the keys begin..end of a head from padded rows."""
    D, width, first = head.D, head.width, begin * round_up(head.D, LANES)
    write_rows(dqkv, head.keys + begin * width, width, at(own.dkeys, first), end - begin, D)
    write_rows(dqkv, head.values + begin * width, width, at(own.dvalues, first), end - begin, D)


@jit
def write_packed_queries(dqkv, own, place, stride, count, D):
    """own.dqueries (D, QUERIES) -> `count` rows from `place` on. Overwrites own.queries."""
    write_columns(own.queries, round_up(D, LANES), own.dqueries, round_up(count, LANES), D)
    write_rows(dqkv, place, stride, own.queries, count, D)


@jit
def write_rows(out, place, stride, rows, count, D):
    """`count` rows of D elements, padded to whole vectors -> out, from `place` on."""
    for i in range(count):
        write_row(out, place + i * stride, rows, i * round_up(D, LANES), D, np.float32(1))


@jit
def write_row(out, place, x, source, count, factor):
    """`count` elements of x from source on, times factor -> out from place on.

    Whatever is behind them is not multiplied: denormal numbers there would take long.
    """
    whole = count // LANES * LANES
    for c in range(0, whole, LANES):
        store(out, place + c, load(x, source + c) * factor)
    if count > whole:
        store_first(
            out, place + whole, load_first(x, source + whole, count - whole) * factor, count - whole
        )


@jit
def prefetch_rows(x, place, stride, rows, D):
    """Prefetches some rows of D elements: the CPU does not see in time where the next one begins.

    The row 0 begins at `place` in x.
    """
    for row in range(rows.left, rows.right):
        for d in range(0, D, line_elements(x)):
            prefetch(x, place + row * stride + d)


@jit
def prefetch_rows_to_write(x, place, stride, rows, D):
    """Prefetches as `prefetch_rows` does, for rows that will be overwritten."""
    for row in range(rows.left, rows.right):
        for d in range(0, D, line_elements(x)):
            prefetch_to_write(x, place + row * stride + d)


@jit
def prefetch_head(qkv, head, rows):
    """Prefetches these queries, keys and values of a head."""
    for place in (head.queries, head.keys, head.values):
        prefetch_rows(qkv, place, head.width, rows, head.D)


@jit
def share_of_rows(first, count, share, shares):
    """Returns the rows of one of several equal shares of `count` rows from `first` on."""
    return Span(first + count * share // shares, first + count * (share + 1) // shares)


@jit
def pack_rows(rows, row, x, place, stride, T, padded, D):
    """T rows of D elements -> the same, contiguous, each padded with zeros to `row` elements.

    And rows of zeros up to `padded`. rows may be stored in 16 bits.
    """
    zero, whole = broadcast(np.float32(0)), D // LANES * LANES
    for t in range(T):
        for d in range(0, whole, LANES):
            store(rows, t * row + d, load(x, place + t * stride + d))
        # Up to two vectors: the words of D channels in pairs are whole vectors too.
        for d in range(whole, row, LANES):
            store(rows, t * row + d, load_first(x, place + t * stride + d, max(0, D - d)))
    for place in range(T * row, padded * row, LANES):
        store(rows, place, zero)
