"""Products of bfloat16 by ARM's `bfmmla`, which multiplies 2 x 4 by 4 x 2 numbers.

Twice as many as its dot product of pairs, with the same bits. Both operands are packed in quads:
four numbers of a row of a, or of a column of b, that are adjacent along K; zeros beyond its end.
The quads of a tile of rows, or of a panel of columns, lie side by side.
"""

from llvmlite import ir
from numba import types

from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import jit, native
from smallmind.kernels.codegen.operation import PLACE, operation
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import LANES, at, prefetch
from smallmind.kernels.codegen.vector_ir import I16, I32, I64
from smallmind.kernels.gemm.bfloat16_words import numbers
from smallmind.kernels.gemm.packing import TRANSPOSE_A, TRANSPOSE_B, PackedPanel, packed_tile
from smallmind.kernels.gemm.tile import (
    FETCHED_AHEAD,
    FLOAT_POINTER,
    NULL,
    PANEL_SIGNATURE,
    TILE_ROWS,
    Rows,
    Strip,
    tile_caller,
    tile_operands,
)

HEIGHT = TILE_ROWS  # rows of the result that are multiplied at a time
READS_WORDS = 0


@operation(types.void, FLOAT_POINTER, PLACE)
def _copy_quad(builder, out, place):
    source, target = (builder.bitcast(x, I64.as_pointer()) for x in (place.pointer, out))
    builder.store(builder.load(source, align=2), target, align=4)


@operation(types.void, FLOAT_POINTER, PLACE, types.int64)
def _interleave_four(builder, out, place, stride):
    """Writes the quads of LANES columns of four rows that are `stride` apart."""
    kind, rows = ir.VectorType(I16, LANES), []
    for r in range(4):
        row = builder.gep(place.pointer, [builder.mul(stride, I64(r))])
        rows.append(builder.load(builder.bitcast(row, kind.as_pointer()), align=2))

    def shuffle(a, b, places):
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(places)), places))

    both = list(range(2 * LANES))
    lower, upper = shuffle(rows[0], rows[1], both), shuffle(rows[2], rows[3], both)
    quads = shuffle(lower, upper, [r * LANES + lane for lane in range(LANES) for r in range(4)])
    builder.store(quads, builder.bitcast(out, quads.type.as_pointer()), align=4)


@jit
def packed_depth(_x, depth):
    """Returns the number of words that `depth` elements of a row become when packed."""
    return 2 * ceil_div(depth, 4)


@jit
def pack_a(a, strip, _row, variant, start, end, first, last, _columns):
    """Rows first..last, K start..end of the left operand -> Strip, of scratch."""
    size = packed_tile(packed_depth(a, end - start))
    for row in range(first, last, TILE_ROWS):
        tile, end_row = at(strip, (row - first) // TILE_ROWS * size), min(last, row + TILE_ROWS)
        if variant == TRANSPOSE_A:
            pack_across(tile, TILE_ROWS, a, start, end, row, end_row)
        else:
            pack_along(tile, TILE_ROWS, a, start, end, row, end_row)
    return Strip(at(strip, 0), size, 1, TILE_ROWS)


@jit
def pack_b(b, panel, variant, start, end, region, _depth):
    """K start..end, columns of a region, of the right operand -> PackedPanel."""
    left, right = region.left, region.right
    width = round_up(right - left, LANES)
    if variant == TRANSPOSE_B:
        pack_along(at(panel, 0), width, b, start, end, left, right)
    else:
        pack_across(at(panel, 0), width, b, start, end, left, right)
    return PackedPanel(Rows(at(panel, 0), width), NULL)


@jit
def pack_along(out, width, x, start, end, first, last):
    """x[first:last, start:end] -> quads (depth, width); those from `last` on are not written."""
    K = x.shape[1]
    whole = (end - start) // 4
    for i in range(first, last):
        place = i * K + start
        for k in range(whole):
            _copy_quad(at(out, 2 * (k * width + i - first)), x, place + 4 * k)
        if start + 4 * whole < end:
            last_quad = at(out, 2 * (whole * width + i - first))
            _copy_numbers(last_quad, at(x, place + 4 * whole), 1, end - start - 4 * whole)


@jit
def pack_across(out, width, x, start, end, first, last):
    """x[start:end, first:last] -> quads (depth, width); those from `last` on are not written."""
    N = x.shape[1]
    for k in range(start, end, 4):
        row, target, count = k * N, (k - start) // 2 * width, min(4, end - k)
        for r in range(4):  # rows are too far apart for the CPU to predict the next
            prefetch(x, row + (FETCHED_AHEAD + r) * N + first)
        whole = (last - first) // LANES * LANES if count == 4 else 0
        for j in range(0, whole, LANES):
            _interleave_four(at(out, target + 2 * j), x, row + first + j, N)
        for j in range(whole, last - first):
            _copy_numbers(at(out, target + 2 * j), at(x, row + first + j), N, count)


@jit
def _copy_numbers(quad, x, stride, count):
    """`count` numbers that are `stride` apart, then zeros -> a quad."""
    out = numbers(quad)
    for r in range(4):
        out[r] = x[r * stride] if r < count else 0


if ISA.quads:
    _call_tile = tile_caller(pairs=False, quads=True)

    @native("smallmind_multiply_quads", PANEL_SIGNATURE)
    def multiply(c, a, b, extent, addend, bias, packed):
        """Computes as `tile.multiply_panel`, but a and b are packed, and depth is in words."""
        for tile in range(ceil_div(extent.rows, TILE_ROWS)):
            c_tile, a_tile, tile_extent, addend_tile = tile_operands(tile, c, a, extent, addend)
            _call_tile(c_tile, a_tile, b, tile_extent, addend_tile, bias, packed)
