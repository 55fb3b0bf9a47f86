"""Attention's products of bfloat16, which the CPU multiplies in pairs: see `bfloat16_words`.

Sums are float32, and so is softmax. Probabilities and the gradients of scores are rounded to
bfloat16 where they are written, over the scores. Words hold pairs of whatever a product adds up:
channels, keys or queries.

`float32` has functions of the same names: see `products`.
"""

import numpy as np

from smallmind.kernels.attention.layout import KEYS as KEYS
from smallmind.kernels.attention.layout import (
    QUERIES,
    HeadOperands,
    pack_rows,
    write_packed_keys,
    write_packed_queries,
)
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import inline_jit, jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import LANES, at, broadcast, load, load_first, store
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.amx_tile import TILE, configure, multiply_tiles, release
from smallmind.kernels.gemm.bfloat16_words import (
    interleave_whole,
    numbers,
    round_two,
    store_halves,
    words,
    zip_halves,
)
from smallmind.kernels.gemm.tile import NULL, PANEL, TILE_ROWS, Extent, Rows, Strip

UNIT = 2 * TILE  # keys and queries are padded to multiples of it
TILE_KEYS = UNIT  # that are multiplied at a time on the diagonal
BLOCK = KEYS // 2  # words of the keys in a block

HAS_TILES = ISA.matrix_unit


def begin(_x):
    """Configures the tiles before the products of a worker."""
    if HAS_TILES:
        configure(TILE, TILE)


def end(_x):
    """Releases the tiles after them."""
    if HAS_TILES:
        release()


if HAS_TILES:

    @jit
    def _multiply(c, a, b, extent, adds):
        """Computes c = a b, or += if it `adds`; a and b are words, the extent is whole tiles."""
        rows, columns, depth = round_up(extent.rows, TILE), extent.columns, extent.depth
        for row in range(0, rows, 2 * TILE):
            for column in range(0, columns, 2 * TILE):
                result = Rows(at(c.start, row * c.stride + column), c.stride)
                multiply_tiles(
                    result,
                    Rows(at(a.start, row * a.stride), a.stride),
                    Rows(at(b.start, column), b.stride),
                    depth,
                    result if adds else Rows(NULL, 0),
                    rows - row > TILE,
                    columns - column > TILE,
                )

else:
    from smallmind.kernels.gemm.bfloat16_pairs import multiply as multiply_pairs

    @jit
    def _multiply(c, a, b, extent, adds):
        """Computes c = a b, or += if it `adds`. a and b consist of words."""
        for column in range(0, extent.columns, PANEL):
            result = Rows(at(c.start, column), c.stride)
            multiply_pairs(
                result,
                Strip(a.start, TILE_ROWS * a.stride, a.stride, 1),
                Rows(at(b.start, column), b.stride),
                Extent(extent.rows, min(PANEL, extent.columns - column), extent.depth),
                result if adds else Rows(NULL, 0),
                NULL,
                NULL,
            )


@inline_jit
def _words(D):
    """-> the words of a row of D channels, padded to whole vectors, which are rows of tiles."""
    return round_up(ceil_div(D, 2), LANES)


@inline_jit
def _depth(D):
    """Returns as many of them are multiplied."""
    return _words(D) if HAS_TILES else ceil_div(D, 2)


def pack_keys_and_values(x, own, head, start, end):
    """Packs the keys and values start..end of a head -> all, for the forward pass.

    start is the first of a block.
    """
    _pack_words(own.keys, x, head.keys, head, start, end)
    _pack_blocks(own.values, x, head.values, head, start, end)
    return own.keys, own.values


def pack_head(x, _dx, own, head, is_first):
    """Packs the keys and values of a head -> operands for the backward pass.

    is_first: whether they were not packed for another head.
    """
    if is_first:
        _pack_words(own.keys, x, head.keys, head, 0, head.T)
        _pack_blocks(own.key_columns, x, head.keys, head, 0, head.T)
        _pack_words(own.values, x, head.values, head, 0, head.T)
    return HeadOperands(own.keys, own.key_columns, own.values, own.dkeys, own.dvalues)


@jit
def _pack_words(rows, x, place, head, start, end):
    """Rows start..end of a head's keys or values -> words of channels (T, D / 2)."""
    row, count = _words(head.D), end - start
    target = at(rows, start * row)
    place += start * head.width
    _pack_rows(target, x, place, head.width, count, round_up(count, UNIT), head.D)


@jit
def _pack_rows(rows, x, place, stride, count, padded, D):
    """`count` rows of x -> words of channels, and rows of zeros up to `padded`."""
    row = _words(D)
    if 2 * row != D:
        pack_rows(numbers(rows), 2 * row, x, place, stride, count, padded, D)
        return
    for t in range(count):
        source = words(at(x, place + t * stride))
        for d in range(0, row, LANES):
            store(rows, t * row + d, load(source, d))
    zero = broadcast(np.float32(0))
    for target in range(count * row, padded * row, LANES):
        store(rows, target, zero)


@jit
def _pack_blocks(columns, x, place, head, start, end):
    """Rows of x, transposed -> words of keys, block after block: (D, KEYS / 2) each."""
    size = round_up(head.D, LANES) * BLOCK
    for first in range(start, end, KEYS):
        target, source = at(columns, first // KEYS * size), place + first * head.width
        count = min(KEYS, end - first)
        for k in range(0, round_up(count, UNIT) // 2, LANES):
            for d in range(0, head.D, LANES):
                tile, channels = at(target, d * BLOCK + k), min(LANES, head.D - d)
                for i in range(LANES):
                    row = 2 * (k + i)
                    _pair_rows(tile, i * BLOCK, x, source + d, head.width, row, count, channels)
                transpose_tile(tile, BLOCK, tile, BLOCK)


@inline_jit
def _pair_rows(out, target, x, place, stride, row, count, channels):
    """Writes the channels of two rows, of `count`, paired; zeros past the last row."""
    place += row * stride
    if channels == LANES and row + 1 < count:
        interleave_whole(at(out, target), at(x, place), at(x, place + stride))
    else:
        first = load_first(x, place, channels if row < count else 0)
        second = load_first(x, place + stride, channels if row + 1 < count else 0)
        store(out, target, zip_halves(round_two(first, second)))


def pack_queries(x, own, place, stride, count, D):
    """`count` queries -> own.queries, words of channels (D / 2, QUERIES), for the forward pass."""
    _pack_columns(own.queries, own.rows, x, place, stride, count, D)


def pack_both(x, rows, columns, spare, place, stride, count, D):
    """`count` rows of x -> the same; returns rows, words of them (QUERIES / 2, D)."""
    D_row = round_up(D, LANES)
    _pack_columns(columns, spare, x, place, stride, count, D)
    for q in range(round_up(count, UNIT) // 2):
        for d in range(0, D, LANES):
            channels = min(LANES, D - d)
            _pair_rows(rows, q * D_row + d, x, place + d, stride, 2 * q, count, channels)
    return rows


@jit
def _pack_columns(columns, rows, x, place, stride, count, D):
    row, padded = _words(D), round_up(count, UNIT)
    # Rows that consist of whole vectors of words are transposed from where they are.
    whole = count // LANES * LANES if 2 * row == D and stride % 2 == 0 else 0
    for i in range(0, whole, LANES):
        source = words(at(x, place + i * stride))
        for d in range(0, row, LANES):
            target = at(columns, d * QUERIES + i)
            transpose_tile(at(source, d), stride // 2, target, QUERIES)
    if whole == padded:
        return
    _pack_rows(rows, x, place + whole * stride, stride, count - whole, padded - whole, D)
    for i in range(whole, padded, LANES):
        for d in range(0, row, LANES):
            source = at(rows, (i - whole) * row + d)
            transpose_tile(source, row, at(columns, d * QUERIES + i), QUERIES)


def store_two(_x, p, row, i, first, second):
    """Writes LANES elements from column i on of the rows `row` and `row` + 1 of p, as words.

    Over what is read by then if p holds the scores.
    """
    store(p, row // 2 * QUERIES + i, zip_halves(round_two(first, second)))


def store_gradients(_x, own, row, i, p, other_p, ds, other_ds):
    """Writes LANES elements of two rows of p and ds.

    p and ds_rows hold words of queries, ds words of keys.
    """
    place = row * QUERIES + i // 2
    store_halves(at(own.p, place), at(own.p, place + QUERIES), round_two(p, other_p))
    both = round_two(ds, other_ds)
    ds_row = at(own.ds_rows, (row * QUERIES + i) // 2)
    store_halves(ds_row, at(ds_row, QUERIES // 2), both)
    store(own.ds, row // 2 * QUERIES + i, zip_halves(both))


def multiply_queries(_x, scores, keys, queries, span, first, width, D):
    """The keys in a span times `width` queries from `first` on -> scores, a row per key.

    Tiles of scores that are all before the diagonal are left out.
    """
    row, left = _words(D), span.left
    # Keys that all queries see, or that none sees because of another document.
    whole = max(0, min(first, span.right) - left)
    if whole > 0:
        _multiply(
            Rows(scores, QUERIES),
            Rows(at(keys, left * row), row),
            Rows(queries, QUERIES),
            Extent(whole, width, _depth(D)),
            False,
        )
    for tile in range(left + whole, span.right, UNIT):
        hidden = max(0, tile - first)
        _multiply(
            Rows(at(scores, (tile - left) * QUERIES + hidden), QUERIES),
            Rows(at(keys, tile * row), row),
            Rows(at(queries, hidden), QUERIES),
            Extent(UNIT, width - hidden, _depth(D)),
            False,
        )


def multiply_keys(_x, c, keys, p, span, first, width, D, adds):
    """Computes c = keys^T p, or += if it `adds`, for a span of keys; both are words of keys.

    c (D, QUERIES), of which `width` columns count. The second half of the queries before the
    diagonal of the first half is left out.
    """
    half = QUERIES // 2
    split = min(span.right, max(span.left, first + half))
    block = at(keys, span.left // KEYS * round_up(D, LANES) * BLOCK)
    for skipped in (0, half):
        begin, end = (span.left, split) if skipped == 0 else (split, span.right)
        if begin == end or skipped >= width:
            continue
        place = (begin - span.left) // 2
        _multiply(
            Rows(at(c, skipped), QUERIES),
            Rows(at(block, place), BLOCK),
            Rows(at(p, place * QUERIES + skipped), QUERIES),
            Extent(D, width - skipped, (end - begin) // 2),
            adds or skipped > 0,
        )


def add_to_keys(_x, own, operands, block, D, first, left, keys, queries, writes):
    """Adds the products of some queries to dk and dv of some keys, or writes them.

    The rows of p and ds begin with the key `left`; their columns, and the rows of the block, with
    the query `first`.
    """
    D_row, source, row = round_up(D, LANES), (queries.left - first) // 2, keys.left - left
    depth = round_up(queries.right - queries.left, UNIT) // 2
    extent = Extent(keys.right - keys.left, D_row, depth)
    _multiply(
        Rows(at(operands.dkeys, keys.left * D_row), D_row),
        Rows(at(own.ds_rows, row * QUERIES // 2 + source), QUERIES // 2),
        Rows(at(block.queries, source * D_row), D_row),
        extent,
        not writes,
    )
    _multiply(
        Rows(at(operands.dvalues, keys.left * D_row), D_row),
        Rows(at(own.p, row * QUERIES + source), QUERIES),
        Rows(at(block.douts, source * D_row), D_row),
        extent,
        not writes,
    )


def write_dkeys_and_dvalues(dqkv, own, head, begin, end):
    """Writes dk and dv of the keys begin..end of a head."""
    write_packed_keys(dqkv, own, head, begin, end)


def write_dqueries(dqkv, own, place, stride, count, D):
    """own.dqueries (D, QUERIES) -> `count` rows from `place` on. Overwrites own.queries."""
    write_packed_queries(dqkv, own, place, stride, count, D)
