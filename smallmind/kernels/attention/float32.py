"""Attention's products in float32: of rows where they are, if they consist of whole vectors.

Others are packed, which pads them and converts them to float32. `pairs` has functions of the same
names: see `products`.
"""

from smallmind.kernels.attention.layout import KEYS as MAX_KEYS
from smallmind.kernels.attention.layout import (
    QUERIES,
    HeadOperands,
    pack_rows,
    write_columns,
    write_packed_keys,
    write_packed_queries,
)
from smallmind.kernels.codegen.jit import inline_jit, jit
from smallmind.kernels.codegen.rounding import round_up
from smallmind.kernels.codegen.simd import LANES, at, store
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.tile import (
    NULL,
    PANEL,
    TILE_ROWS,
    Extent,
    Rows,
    Strip,
    float32_at,
    is_float32,
    multiply_panel,
)

KEYS = MAX_KEYS
TILE_KEYS = TILE_ROWS  # that are multiplied at a time on the diagonal
UNIT = 1  # keys and queries are padded to multiples of it


def begin(_x):
    """Does nothing before the products of a worker."""


def end(_x):
    """Does nothing after them."""


@inline_jit
def _fit(x, D):
    """Returns True if rows of D elements are multiplied in place."""
    return is_float32(x) and D % LANES == 0


@jit
def _rows(x, place, stride, packed, D):
    """Returns rows of D elements, in x or packed."""
    if _fit(x, D):
        return Rows(float32_at(x, place), stride)
    return Rows(packed, round_up(D, LANES))


def pack_keys_and_values(x, own, head, start, end):
    """Packs the keys and values start..end of a head, if need be -> all, for the forward pass."""
    if not _fit(x, head.D):
        _pack(x, own, head, start, end)
    return (
        _rows(x, head.keys, head.width, own.keys, head.D),
        _rows(x, head.values, head.width, own.values, head.D),
    )


@jit
def _pack(x, own, head, start, end):
    D, width, count, D_row = head.D, head.width, end - start, round_up(head.D, LANES)
    for rows, place in ((own.keys, head.keys), (own.values, head.values)):
        target = at(rows, start * D_row)
        pack_rows(target, D_row, x, place + start * width, width, count, count, D)


def pack_head(x, dx, own, head, is_first):
    """Packs the keys and values of a head, if need be -> operands for the backward pass.

    dx: where their gradients belong; is_first: whether they were not packed for another head.
    """
    D, width = head.D, head.width
    if is_first and not _fit(x, D):
        _pack(x, own, head, 0, head.T)
    keys = _rows(x, head.keys, width, own.keys, D)
    return HeadOperands(
        keys,
        keys,
        _rows(x, head.values, width, own.values, D),
        _rows(dx, head.keys, width, own.dkeys, D),
        _rows(dx, head.values, width, own.dvalues, D),
    )


def pack_queries(x, own, place, stride, count, D):
    """`count` queries -> own.queries (D, columns), for the forward pass."""
    _pack_both(x, own.rows, own.queries, place, stride, count, D)


def pack_both(x, rows, columns, _spare, place, stride, count, D):
    """`count` rows of x -> columns (D, count); returns rows (count, D), for the backward pass."""
    return _pack_both(x, rows, columns, place, stride, count, D)


@jit
def _pack_both(x, rows, columns, place, stride, count, D):
    if _fit(x, D) and count % LANES == 0:
        found = _rows(x, place, stride, rows, D)
    else:
        # Pad D to whole tiles; the padding columns are not read from x.
        pack_rows(rows, round_up(D, LANES), x, place, stride, count, round_up(count, LANES), D)
        found = Rows(rows, round_up(D, LANES))
    _transpose_rows(columns, found, count, D)
    return found


def store_two(_x, p, row, i, first, second):
    """Writes LANES elements from column i on of the rows `row` and `row` + 1 of p."""
    store(p, row * QUERIES + i, first)
    store(p, (row + 1) * QUERIES + i, second)


def store_gradients(_x, own, row, i, p, other_p, ds, other_ds):
    """Writes LANES elements of two rows of p and ds."""
    place = row * QUERIES + i
    store(own.p, place, p)
    store(own.p, place + QUERIES, other_p)
    store(own.ds, place, ds)
    store(own.ds, place + QUERIES, other_ds)


@jit
def _multiply(c, a, b, extent):
    """Computes c = a b: `multiply_panel` with nothing to add and nothing to pack."""
    multiply_panel(c, a, b, extent, Rows(NULL, 0), NULL, NULL)


def multiply_queries(_x, scores, keys, queries, span, first, width, D):
    """The keys in a span times `width` queries from `first` on -> scores, a row per key.

    keys (T, D), queries (D, width) in panels; scores (KEYS, QUERIES). Vectors of scores that are
    all before the diagonal are left out.
    """
    row, left = keys.stride, span.left
    # Rows of keys that all queries see, or that none sees because of another document.
    whole = max(0, min(first, span.right) - left) // TILE_ROWS * TILE_ROWS
    if whole > 0:
        for panel in range(0, width, PANEL):
            _multiply(
                Rows(at(scores, panel), QUERIES),
                Strip(at(keys.start, left * row), TILE_ROWS * row, row, 1),
                Rows(at(queries, panel * D), PANEL),
                Extent(whole, min(PANEL, width - panel), D),
            )
    for tile in range(left + whole, span.right, TILE_ROWS):
        hidden = max(0, tile - first) // LANES * LANES
        for panel in range(hidden // PANEL * PANEL, width, PANEL):
            column = max(hidden, panel)
            _multiply(
                Rows(at(scores, (tile - left) * QUERIES + column), QUERIES),
                Strip(at(keys.start, tile * row), TILE_ROWS * row, row, 1),
                Rows(at(queries, panel * D + column - panel), PANEL),
                Extent(min(TILE_ROWS, span.right - tile), min(panel + PANEL, width) - column, D),
            )


def multiply_keys(_x, c, keys, p, span, first, width, D, adds):
    """Computes c = keys^T p for the keys in a span, or += if it `adds`; p has a row per key.

    c (D, QUERIES), keys (T, D), p (KEYS, QUERIES), of which `width` columns count. The second half
    of the queries before the diagonal of the first half is left out.
    """
    half = QUERIES // 2
    split = min(span.right, max(span.left, first + half))
    for skipped in (0, half):
        begin, end = (span.left, split) if skipped == 0 else (split, span.right)
        if begin == end:
            continue
        for column in range(skipped, width, PANEL):
            result = Rows(at(c, column), QUERIES)
            multiply_panel(
                result,
                Strip(at(keys.start, begin * keys.stride), TILE_ROWS, 1, keys.stride),
                Rows(at(p, (begin - span.left) * QUERIES + column), QUERIES),
                Extent(D, min(PANEL, width - column), end - begin),
                result if adds or skipped > 0 else Rows(NULL, 0),
                NULL,
                NULL,
            )


def add_to_keys(_x, own, operands, block, D, first, left, keys, queries, writes):
    """Adds the products of some queries to dk and dv of some keys, or writes them.

    The rows of p and ds begin with the key `left`; their columns, and the rows of the block, with
    the query `first`.
    """
    place = (keys.left - left) * QUERIES + queries.left - first
    for target, weights, rows in (
        (operands.dkeys, own.ds, block.queries),
        (operands.dvalues, own.p, block.douts),
    ):
        for column in range(0, round_up(D, LANES), PANEL):
            columns = min(PANEL, round_up(D, LANES) - column)
            sums = _part(target, keys.left, column)
            multiply_panel(
                sums,
                Strip(at(weights, place), TILE_ROWS * QUERIES, QUERIES, 1),
                _part(rows, queries.left - first, column),
                Extent(keys.right - keys.left, columns, queries.right - queries.left),
                Rows(NULL, 0) if writes else sums,
                NULL,
                NULL,
            )


@inline_jit
def _part(rows, row, column):
    """Returns the rows from `row` on, from a column on."""
    return Rows(at(rows.start, row * rows.stride + column), rows.stride)


def write_dkeys_and_dvalues(dqkv, own, head, begin, end):
    """Writes dk and dv of the keys begin..end of a head, unless they were added there."""
    if not _fit(dqkv, head.D):
        write_packed_keys(dqkv, own, head, begin, end)


def write_dqueries(dqkv, own, place, stride, count, D):
    """own.dqueries (D, QUERIES) -> `count` rows from `place` on. Overwrites own.queries."""
    if _fit(dqkv, D) and count % LANES == 0:
        write_columns(float32_at(dqkv, place), stride, own.dqueries, count, D)
    else:
        write_packed_queries(dqkv, own, place, stride, count, D)


@jit
def _transpose_rows(panels, rows, count, D):
    """`count` rows (count, D) -> their transpose as panels (D, PANEL), of whole vectors.

    Also of the padding, whose rows the next panel overwrites.
    """
    for i in range(0, count, LANES):
        column = i // PANEL * PANEL * D + i % PANEL
        for d in range(0, D, LANES):
            target = at(panels, column + d * PANEL)
            transpose_tile(at(rows.start, i * rows.stride + d), rows.stride, target, PANEL)
