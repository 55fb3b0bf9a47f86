"""What both passes of attention share: where heads lie in the arrays, and how they are packed."""

from typing import Any, NamedTuple

import numpy as np

from smallmind.kernels.codegen.jit import called_jit, inline_jit, jit
from smallmind.kernels.codegen.rounding import round_up
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    element,
    first_or,
    load,
    load_first,
    store,
    store_first,
)
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.tile import (
    NULL,
    PANEL,
    TILE_ROWS,
    Extent,
    Rows,
    Strip,
    multiply_panel,
)

# Queries and keys whose scores are computed at a time: they stay in the first-level cache.
QUERIES = 64
KEYS = 8 * TILE_ROWS
_ONE_DOCUMENT = np.zeros((1, 1), np.int32)  # all queries see the first key


class Shape(NamedTuple):
    """The sizes of an attention: H heads of queries in G groups, each with its keys and values."""

    B: int
    T: int
    H: int
    G: int
    D: int
    has_documents: bool


def attention_shape(qkv, out, logsumexp, firsts):
    """qkv (B T, (H + 2 G) D), out (B T, H D), logsumexp (B, H, T) -> their sizes.

    And whether there are firsts (B, T).
    """
    B, H, T = logsumexp.shape
    D = out.shape[1] // H
    return Shape(B, T, H, (qkv.shape[1] // D - H) // 2, D, firsts is not None)


def first_keys(firsts):
    """firsts (B, T) or None -> an array in any case: kernels are compiled for one type only."""
    return _ONE_DOCUMENT if firsts is None else firsts


class Head(NamedTuple):
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


@jit
def row_of_share(T, share):
    """The row at a share of T, moved to the nearest multiple of QUERIES."""
    return T if share >= 1 else min(T, np.int64(share * T + QUERIES / 2) // QUERIES * QUERIES)


@jit
def head_at(index, shape, firsts):
    """The head with this number, counted over the queries of all sequences.

    firsts is a pointer to the array.
    """
    T, H, G, D = shape.T, shape.H, shape.G, shape.D
    b, h = index // H, index % H
    width, C, group = (H + 2 * G) * D, H * D, h // (H // G)
    row = b * T * width
    keys = row + C + group * D
    step = 1 if shape.has_documents else 0
    return Head(
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
    )


@inline_jit
def first_key(head, query):
    """The first key that a query sees. It never decreases from one query to the next."""
    return np.int64(head.firsts[query * head.firsts_step])


class Span(NamedTuple):
    """The keys, or columns, left..right."""

    left: int
    right: int


class Seen(NamedTuple):
    """Of a span of keys, those that some of LANES queries see, and those that all of them see."""

    begin: int
    whole_begin: int
    whole_end: int
    end: int


@jit
def seen_keys(head, query, keys):
    """The keys seen by LANES queries from this one on."""
    begin = min(keys.right, max(keys.left, first_key(head, query)))
    end = max(begin, min(keys.right, query + LANES))
    last = min(query + LANES, head.T) - 1
    whole_begin = min(end, max(begin, first_key(head, last)))
    return Seen(begin, whole_begin, max(whole_begin, min(keys.right, query + 1)), end)


@jit
def where_seen(value, otherwise, head, query, key):
    """value in the lanes of the queries, from this one on, that see the key, else `otherwise`."""
    value = first_or(otherwise, key - query, value)
    if head.firsts_step > 0:
        count = 0
        while count < min(LANES, head.T - query) and first_key(head, query + count) <= key:
            count += 1
        value = first_or(value, count, otherwise)
    return value


@called_jit
def row_elements(rows, D):
    """Elements of as many queries, keys or values of a head, in padded rows."""
    return rows * round_up(D, LANES)


@jit
def multiply(c, a, b, extent):
    """c = a b: `multiply_panel` with nothing to add and nothing to pack."""
    multiply_panel(c, a, b, extent, Rows(NULL, 0), NULL, NULL)


@jit
def multiply_queries(scores, keys, queries, span, first, width, D):
    """The keys in a span times `width` queries from `first` on -> scores, a row per key.

    keys (T, D) in padded rows, queries (D, width) in panels; scores (KEYS, QUERIES). Vectors of
    scores that are all before the diagonal are left out.
    """
    D_row, left = round_up(D, LANES), span.left
    # Those that all queries see, or none because of another document: whole rows.
    whole = max(0, min(first, span.right) - left) // TILE_ROWS * TILE_ROWS
    if whole > 0:
        for panel in range(0, width, PANEL):
            multiply(
                Rows(at(scores, panel), QUERIES),
                Strip(at(keys, left * D_row), TILE_ROWS * D_row, D_row, 1),
                Rows(at(queries, panel * D), PANEL),
                Extent(whole, min(PANEL, width - panel), D),
            )
    for tile in range(left + whole, span.right, TILE_ROWS):
        hidden = max(0, tile - first) // LANES * LANES
        for panel in range(hidden // PANEL * PANEL, width, PANEL):
            column = max(hidden, panel)
            multiply(
                Rows(at(scores, (tile - left) * QUERIES + column), QUERIES),
                Strip(at(keys, tile * D_row), TILE_ROWS * D_row, D_row, 1),
                Rows(at(queries, panel * D + column - panel), PANEL),
                Extent(min(TILE_ROWS, span.right - tile), min(panel + PANEL, width) - column, D),
            )


@jit
def multiply_keys(c, keys, p, span, first, width, D, adds):
    """c = keys^T p for the keys in a span, or += if it `adds`; p has a row per key.

    c (D, QUERIES), keys (T, D) in padded rows, p (KEYS, QUERIES), of which `width` columns count.
    The second half of the queries before the diagonal of the first half is left out.
    """
    half = QUERIES // 2
    split = min(span.right, max(span.left, first + half))
    D_row = round_up(D, LANES)
    for skipped in (0, half):
        begin, end = (span.left, split) if skipped == 0 else (split, span.right)
        if begin == end:
            continue
        for column in range(skipped, width, PANEL):
            result = Rows(at(c, column), QUERIES)
            multiply_panel(
                result,
                Strip(at(keys, begin * D_row), TILE_ROWS, 1, D_row),
                Rows(at(p, (begin - span.left) * QUERIES + column), QUERIES),
                Extent(D, min(PANEL, width - column), end - begin),
                result if adds or skipped > 0 else Rows(NULL, 0),
                NULL,
                NULL,
            )


@jit
def write_columns(rows, x, width, D):
    """x (D, QUERIES) -> its first `width` columns as padded rows."""
    D_row = round_up(D, LANES)
    for d in range(0, D, LANES):
        for i in range(0, width, LANES):
            transpose_tile(at(x, d * QUERIES + i), QUERIES, at(rows, i * D_row + d), D_row)


@jit
def write_row(out, place, x, source, count, factor):
    """`count` elements of x from source on, times factor -> out from place on."""
    whole = count // LANES * LANES
    for c in range(0, whole, LANES):
        store(out, place + c, load(x, source + c) * factor)
    if count > whole:
        store_first(out, place + whole, load(x, source + whole) * factor, count - whole)


@jit
def pack_columns(panels, x, place, stride, T, D):
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
def pack_rows(rows, x, place, stride, T, D):
    """T rows of D elements -> the same, contiguous, each padded with zeros to whole vectors."""
    D_row = round_up(D, LANES)
    for t in range(T):
        for d in range(0, D, LANES):
            count = min(LANES, D - d)
            store(rows, t * D_row + d, load_first(x, place + t * stride + d, count))
