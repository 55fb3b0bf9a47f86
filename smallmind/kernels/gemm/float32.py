"""Products of float32: operands are read in place, or packed where that is faster.

A panel of b is packed by the first tile that reads it: this is free, as the load and store units
are idle most of the time.
"""

from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import inline_jit, jit
from smallmind.kernels.codegen.rounding import round_up
from smallmind.kernels.codegen.simd import LANES, at
from smallmind.kernels.gemm.packing import (
    MAX_DEPTH,
    MAX_STRIP_ROWS,
    TRANSPOSE_A,
    TRANSPOSE_B,
    PackedPanel,
    copy_rows,
    pack_columns,
    pack_transposed,
    packed_tile,
)
from smallmind.kernels.gemm.tile import NULL, PANEL, TILE_ROWS, Rows, Strip, multiply_panel

HEIGHT = TILE_ROWS  # rows of the result that are multiplied at a time
READS_WORDS = 0
MIN_ROWS_TO_PACK_B = TILE_ROWS + 1  # from this many rows a packed panel of b is read again
MIN_COLUMNS_TO_PACK_A = ISA.packs_a_from * PANEL  # columns of b that read a
STRIP_SIZE = MAX_STRIP_ROWS // TILE_ROWS * packed_tile.py_func(MAX_DEPTH // 2)
multiply = multiply_panel


@inline_jit
def packed_depth(_x, depth):
    """Returns the number of float32 that `depth` elements of a row are."""
    return depth


@jit
def pack_a(a, strip, _row, variant, start, end, first, last, columns):
    """Rows first..last, K start..end of the left operand -> Strip, in a itself or in scratch."""
    if variant != TRANSPOSE_A:
        K = a.shape[1]
        return Strip(at(a, first * K + start), TILE_ROWS * K, K, 1)
    if columns >= MIN_COLUMNS_TO_PACK_A:
        pack_columns(strip, a, start, end, first, last)
        return Strip(at(strip, 0), packed_tile(end - start), 1, TILE_ROWS)
    M = a.shape[1]
    return Strip(at(a, start * M + first), TILE_ROWS, 1, M)


@jit
def pack_b(b, panel, variant, start, end, region, depth):
    """K start..end, columns of a region, of the right operand -> PackedPanel, in b or packed."""
    N, width = b.shape[1], round_up(region.right - region.left, LANES)
    packed = PackedPanel(Rows(at(panel, 0), width), NULL)
    if variant == TRANSPOSE_B:
        pack_transposed(panel, b, start, end, region.left, region.right)
        return packed
    source = start * N + region.left
    if region.right - region.left < width:
        copy_rows(panel, width, b, source, depth, region.right - region.left)
        return packed
    is_read_again = region.last - region.first >= MIN_ROWS_TO_PACK_B
    return PackedPanel(Rows(at(b, source), N), at(panel, 0) if is_read_again else NULL)
