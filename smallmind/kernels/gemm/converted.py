"""Products of 16-bit numbers that are converted to float32 as they are packed."""

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.rounding import round_up
from smallmind.kernels.codegen.simd import LANES, at
from smallmind.kernels.gemm.packing import (
    TRANSPOSE_A,
    TRANSPOSE_B,
    PackedPanel,
    copy_rows,
    pack_columns,
    pack_transposed,
    packed_tile,
)
from smallmind.kernels.gemm.tile import NULL, TILE_ROWS, Rows, Strip, multiply_panel

HEIGHT = TILE_ROWS  # rows of the result that are multiplied at a time
READS_WORDS = 0
multiply = multiply_panel


@jit
def packed_depth(_x, depth):
    """Returns the number of float32 that `depth` elements of a row become when packed."""
    return depth


@jit
def pack_a(a, strip, row, variant, start, end, first, last, _columns):
    """Rows first..last, K start..end of the left operand -> Strip, of scratch.

    row: float32 from a packed row to the next.
    """
    if variant == TRANSPOSE_A:
        pack_columns(strip, a, start, end, first, last)
        return Strip(at(strip, 0), packed_tile(end - start), 1, TILE_ROWS)
    copy_rows(strip, row, a, first * a.shape[1] + start, last - first, end - start)
    return Strip(at(strip, 0), TILE_ROWS * row, row, 1)


@jit
def pack_b(b, panel, variant, start, end, region, depth):
    """K start..end, columns of a region, of the right operand -> PackedPanel (depth, vectors)."""
    left, right = region.left, region.right
    width = round_up(right - left, LANES)
    if variant == TRANSPOSE_B:
        pack_transposed(panel, b, start, end, left, right)
    else:
        source = start * b.shape[1] + left
        copy_rows(panel, width, b, source, depth, right - left)
    return PackedPanel(Rows(at(panel, 0), width), NULL)
