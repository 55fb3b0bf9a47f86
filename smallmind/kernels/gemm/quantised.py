"""Products with weights in blocks of small integers, which become float32 as they are packed.

The left operand is float32. There is no dequantised copy of a matrix: a panel is scratch.
"""

from smallmind.kernels.codegen.blocks import block_bytes, load_values, transpose_blocks
from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.rounding import round_up
from smallmind.kernels.codegen.simd import LANES, at, store
from smallmind.kernels.gemm.packing import TRANSPOSE_B, PackedPanel
from smallmind.kernels.gemm.tile import NULL, Rows
from smallmind.kernels.number_types import BLOCK


@jit
def pack_b(b, panel, variant, start, end, region, depth):
    """K start..end, columns of a region, of the right operand -> PackedPanel (depth, vectors).

    If it is transposed, start is a multiple of BLOCK; otherwise the columns are whole vectors.
    """
    left, right = region.left, region.right
    width, size = round_up(right - left, LANES), block_bytes(b)
    if variant == TRANSPOSE_B:
        row = b.shape[1]
        for j in range(0, width, LANES):
            for k in range(0, depth, BLOCK):
                place = (left + j) * row + (start + k) // BLOCK * size
                target = at(panel, k * width + j)
                transpose_blocks(b, place, row, right - left - j - 1, target, width)
    else:
        columns = b.shape[1] // size * BLOCK
        for k in range(depth):
            source = (start + k) * columns + left
            for j in range(0, width, LANES):
                store(panel, k * width + j, load_values(b, source + j))
    return PackedPanel(Rows(at(panel, 0), width), NULL)
