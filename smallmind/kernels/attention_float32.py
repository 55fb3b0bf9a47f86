"""Attention's products in float32, to which operands are converted as they are packed.

`attention_pairs` has functions of the same names: see `attention_products`.
"""

from smallmind.kernels.attention_heads import KEYS as MAX_KEYS
from smallmind.kernels.attention_heads import QUERIES, pack_rows
from smallmind.kernels.codegen.jit import jit
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
    multiply_panel,
)

KEYS = MAX_KEYS
TILE_KEYS = TILE_ROWS  # that are multiplied at a time on the diagonal
UNIT = 1  # keys and queries are padded to multiples of it


def begin_products(_x):
    """Before the products of a worker."""


def end_products(_x):
    """After them."""


def pack_keys_and_values(x, own, head, start, end):
    """Packs the keys and values start..end of a head for the forward pass."""
    _pack(x, own, head, start, end)


@jit
def _pack(x, own, head, start, end):
    D, width, count, D_row = head.D, head.width, end - start, round_up(head.D, LANES)
    for rows, place in ((own.keys, head.keys), (own.values, head.values)):
        target = at(rows, start * D_row)
        pack_rows(target, D_row, x, place + start * width, width, count, count, D)


def pack_head(x, own, head):
    """Packs the keys and values of a head for the backward pass."""
    _pack(x, own, head, 0, head.T)


def pack_queries(x, own, place, stride, count, D):
    """`count` queries -> own.queries (D, columns), for the forward pass."""
    _pack_both(x, own.rows, own.queries, place, stride, count, D)


def pack_both(x, rows, columns, _spare, place, stride, count, D):
    """`count` rows of x -> rows (count, D) and columns (D, count), for the backward pass."""
    _pack_both(x, rows, columns, place, stride, count, D)


@jit
def _pack_both(x, rows, columns, place, stride, count, D):
    # The columns not from x again, and in whole tiles whatever D is.
    pack_rows(rows, round_up(D, LANES), x, place, stride, count, round_up(count, LANES), D)
    _transpose_rows(columns, rows, count, D)


def key_columns(_x, own):
    """The packed keys that `multiply_keys` takes."""
    return own.keys


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
    """c = a b: `multiply_panel` with nothing to add and nothing to pack."""
    multiply_panel(c, a, b, extent, Rows(NULL, 0), NULL, NULL)


def multiply_queries(_x, scores, keys, queries, span, first, width, D):
    """The keys in a span times `width` queries from `first` on -> scores, a row per key.

    keys (T, D) in padded rows, queries (D, width) in panels; scores (KEYS, QUERIES). Vectors of
    scores that are all before the diagonal are left out.
    """
    D_row, left = round_up(D, LANES), span.left
    # Those that all queries see, or none because of another document: whole rows.
    whole = max(0, min(first, span.right) - left) // TILE_ROWS * TILE_ROWS
    if whole > 0:
        for panel in range(0, width, PANEL):
            _multiply(
                Rows(at(scores, panel), QUERIES),
                Strip(at(keys, left * D_row), TILE_ROWS * D_row, D_row, 1),
                Rows(at(queries, panel * D), PANEL),
                Extent(whole, min(PANEL, width - panel), D),
            )
    for tile in range(left + whole, span.right, TILE_ROWS):
        hidden = max(0, tile - first) // LANES * LANES
        for panel in range(hidden // PANEL * PANEL, width, PANEL):
            column = max(hidden, panel)
            _multiply(
                Rows(at(scores, (tile - left) * QUERIES + column), QUERIES),
                Strip(at(keys, tile * D_row), TILE_ROWS * D_row, D_row, 1),
                Rows(at(queries, panel * D + column - panel), PANEL),
                Extent(min(TILE_ROWS, span.right - tile), min(panel + PANEL, width) - column, D),
            )


def multiply_keys(_x, c, keys, p, span, first, width, D, adds):
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


def add_to_keys(_x, own, D, first, left, keys, queries, writes):
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
def _transpose_rows(panels, rows, count, D):
    """`count` padded rows (count, D) -> their transpose as panels (D, PANEL), of whole vectors.

    Also of the padding, whose rows the next panel overwrites.
    """
    D_row = round_up(D, LANES)
    for i in range(0, count, LANES):
        column = i // PANEL * PANEL * D + i % PANEL
        for d in range(0, D, LANES):
            target = at(panels, column + d * PANEL)
            transpose_tile(at(rows, i * D_row + d), D_row, target, PANEL)
