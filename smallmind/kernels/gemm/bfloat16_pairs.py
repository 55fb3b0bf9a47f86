"""Products of bfloat16 by the CPU's dot product, which multiplies pairs: `bfloat16_words`."""

from smallmind.kernels.codegen.jit import jit, native
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import LANES, at, prefetch
from smallmind.kernels.gemm.bfloat16_words import interleave, interleave_whole, pack_words, words
from smallmind.kernels.gemm.bfloat16_words import pack_b as pack_b
from smallmind.kernels.gemm.packing import TRANSPOSE_A, packed_tile
from smallmind.kernels.gemm.tile import (
    FETCHED_AHEAD,
    LINE,
    PANEL_SIGNATURE,
    TILE_ROWS,
    Strip,
    tile_caller,
    tile_operands,
)

HEIGHT = TILE_ROWS  # rows of the result that are multiplied at a time
READS_WORDS = 1  # of a where they are, if its rows consist of words
_call_pairs_tile = tile_caller(pairs=True)


@native("smallmind_multiply_pairs", PANEL_SIGNATURE)
def multiply(c, a, b, extent, addend, bias, packed):
    """Computes as `tile.multiply_panel`; a, b and depth are in words, and b is already packed."""
    for tile in range(ceil_div(extent.rows, TILE_ROWS)):
        c_tile, a_tile, tile_extent, addend_tile = tile_operands(tile, c, a, extent, addend)
        _call_pairs_tile(c_tile, a_tile, b, tile_extent, addend_tile, bias, packed)


@jit
def packed_depth(_x, depth):
    """Returns the number of words that `depth` elements of a row become when packed."""
    return ceil_div(depth, 2)


@jit
def pack_a(a, strip, row, variant, start, end, first, last, _columns):
    """Rows first..last, K start..end of the left operand -> Strip, of scratch or of a.

    row: words from a packed row to the next.
    """
    if variant == TRANSPOSE_A:
        pack_word_columns(strip, a, start, end, first, last)
        return Strip(at(strip, 0), packed_tile(packed_depth(a, end - start)), 1, TILE_ROWS)
    K = a.shape[1]
    if K % 2 == 0:  # the rows of a consist of words
        return Strip(words(at(a, first * K + start)), TILE_ROWS * (K // 2), K // 2, 1)
    pack_words(strip, row, a, start, end, first, last)
    return Strip(at(strip, 0), TILE_ROWS * row, row, 1)


@jit
def pack_word_columns(strip, a, start, end, first, last):
    """a[start:end, first:last] -> words in strip, TILE_ROWS columns at a time.

    Like packing.pack_columns, with half the depth.
    """
    M = a.shape[1]
    depth, tiles = ceil_div(end - start, 2), ceil_div(last - first, TILE_ROWS)
    size = packed_tile(depth)
    # At least this many tiles can be read in whole vectors.
    readable = max(0, min(tiles, (M - first - round_up(TILE_ROWS, LANES)) // TILE_ROWS + 1))
    for k in range(depth):
        row, target = (start + 2 * k) * M + first, k * TILE_ROWS
        for column in range(0, last - first, 2 * LINE):
            prefetch(a, row + FETCHED_AHEAD * M + column)
            prefetch(a, row + (FETCHED_AHEAD + 1) * M + column)
        whole = readable if start + 2 * k + 1 < end else 0
        for tile in range(whole):
            for v in range(0, TILE_ROWS, LANES):
                lower = row + tile * TILE_ROWS + v
                interleave_whole(at(strip, target + v), at(a, lower), at(a, lower + M))
            target += size
        for tile in range(whole, tiles):
            for v in range(0, TILE_ROWS, LANES):
                column = tile * TILE_ROWS + v
                step = M if start + 2 * k + 1 < end else 0
                interleave(strip, target + v, a, row + column, step, M - first - column)
            target += size
