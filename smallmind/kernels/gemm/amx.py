"""Products of bfloat16 on the matrix unit of the CPU: Intel's AMX.

The words are those of `bfloat16_words`; the depth is padded with zeros to a multiple of TILE words.
"""

from smallmind.kernels.codegen.jit import inline_jit, jit, native
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import LANES, at, load_first, store
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.amx_tile import (
    TILE,
    Rounded,
    configure,
    multiply_tiles,
    multiply_tiles_beside,
    release,
)
from smallmind.kernels.gemm.bfloat16_words import (
    bfloat16_or_null,
    interleave,
    is_bfloat16,
    pack_b,
    pack_words,
    words,
)
from smallmind.kernels.gemm.operands import finish
from smallmind.kernels.gemm.packing import TRANSPOSE_A, Region, padded_row
from smallmind.kernels.gemm.tile import NULL, PANEL_SIGNATURE, Extent, Rows, Strip, advance

HEIGHT = 2 * TILE  # rows of the result that are multiplied at a time
WIDTH = 2 * TILE  # and columns, where b stays packed
BLOCK_SIZE = HEIGHT * WIDTH
READS_WORDS = 0


@jit
def packed_depth(_x, depth):
    """Returns the number of words that `depth` elements of a row become when packed."""
    return round_up(ceil_div(depth, 2), TILE)


@jit
def pack_a(a, strip, row, variant, start, end, first, last, _columns):
    """Rows first..last, K start..end of the left operand -> Strip, of scratch or of a.

    row: words from a packed row to the next.
    """
    K = a.shape[1]
    if variant == TRANSPOSE_A:
        _pack_columns(strip, row, a, start, end, first, last)
    elif K % 2:
        strip[: (last - first) * row] = 0
        pack_words(strip, row, a, start, end, first, last)
    elif (end - start) % (2 * TILE):
        for i in range(last - first):
            source = words(at(a, (first + i) * K + start))
            count = (end - start) // 2
            for k in range(0, packed_depth(a, end - start), TILE):
                store(strip, i * row + k, load_first(source, k, min(TILE, count - k)))
    else:  # the rows of a consist of words
        return Strip(words(at(a, first * K + start)), HEIGHT * (K // 2), K // 2, 1)
    return Strip(at(strip, 0), HEIGHT * row, row, 1)


@jit
def _pack_columns(strip, row, a, start, end, first, last):
    """a[start:end, first:last]^T -> words in strip, row by row; whole tiles of rows."""
    M = a.shape[1]
    for k in range(0, packed_depth(a, end - start), TILE):
        for column in range(0, last - first, TILE):
            for i in range(TILE):
                lower = start + 2 * (k + i)
                count = M - first - column if lower < end else 0
                place = lower * M + first + column
                step = M if lower + 1 < end else 0
                interleave(strip, (column + i) * row + k, a, place, step, count)
            tile = at(strip, column * row + k)
            transpose_tile(tile, row, tile, row)


@inline_jit
def begin():
    """Configures the tile registers for whole tiles, before `multiply_configured`."""
    configure(TILE, TILE)


end = release


@jit
def _multiply_two_by_two(c, a, b, extent, addend, row, column):
    multiply_tiles(
        Rows(advance(c.start, row * c.stride + column), c.stride),
        Rows(advance(a.start, row * a.row), a.row),
        Rows(advance(b.start, column), b.stride),
        extent.depth,
        Rows(advance(addend.start, row * addend.stride + column), addend.stride),
        extent.rows - row > TILE,
        extent.columns - column > TILE,
    )


# They come last because they are compiled when they are defined.
@native("smallmind_multiply_configured", PANEL_SIGNATURE)
def multiply_configured(c, a, b, extent, addend, bias, packed):
    """Computes as `multiply` does, between `begin` and `end`."""
    whole = extent.rows // HEIGHT * HEIGHT
    for column in range(0, extent.columns, 2 * TILE):
        # The columns of b stay in the first-level cache, while the rows of a pass through it.
        for row in range(0, whole, HEIGHT):
            _multiply_two_by_two(c, a, b, extent, addend, row, column)
    if whole < extent.rows:
        rows = extent.rows - whole
        configure(min(TILE, rows), max(1, rows - TILE))
        for column in range(0, extent.columns, 2 * TILE):
            _multiply_two_by_two(c, a, b, extent, addend, whole, column)
        configure(TILE, TILE)


@native("smallmind_multiply_amx", PANEL_SIGNATURE)
def multiply(c, a, b, extent, addend, bias, packed):
    """Computes as `tile.multiply_panel`; a, b and depth are in words, padded and already packed.

    c is written up to whole vectors of columns. bias and packed are NULL.
    """
    begin()
    multiply_configured(c, a, b, extent, addend, bias, packed)
    end()


@inline_jit
def _is_simple(operands, region):
    """Returns True for two by two whole tiles of bfloat16 without an activation."""
    is_whole = region.last - region.first == HEIGHT and region.right - region.left == WIDTH
    is_plain = operands.activation.size == 0 and is_bfloat16(operands.bias)
    return is_whole and is_plain and is_bfloat16(operands.out) and is_bfloat16(operands.addend)


@inline_jit
def _rounded(operands, sums, region):
    N = operands.out.shape[1]
    place = region.first * N + region.left
    return Rounded(
        sums,
        bfloat16_or_null(operands.out, place),
        bfloat16_or_null(operands.bias, region.left),
        bfloat16_or_null(operands.addend, place),
        N,
        HEIGHT,
    )


@jit
def multiply_by_rows(operands, packed, region):
    """Computes a region of a b or a b^T, two tiles of rows at a time -> True unless K is too large.

    As much of b as the second-level cache holds stays there, packed; the rows of a are read once
    for it, and those of the result are written from left to right. The sums of two by two tiles are
    rounded while the next ones are multiplied.
    """
    a, b, variant = operands.a, operands.b, operands.variant
    K, N = a.shape[1], operands.out.shape[1]
    depth = packed_depth(a, K)
    row = padded_row(depth)
    width = len(packed.strip) // depth // WIDTH * WIDTH
    if HEIGHT * row > len(packed.sums) - 2 * BLOCK_SIZE or width == 0:
        return False
    begin()
    for left in range(region.left, region.right, width):
        right = min(region.right, left + width)
        for column in range(left, right, WIDTH):
            part = Region(0, 0, column, min(right, column + WIDTH))
            pack_b(b, packed.strip[(column - left) * depth :], variant, 0, K, part, depth)
        before, turn = Region(0, 0, 0, 0), 0
        for first in range(region.first, region.last, HEIGHT):
            last = min(region.last, first + HEIGHT)
            strip = pack_a(a, packed.sums[2 * BLOCK_SIZE :], row, variant, 0, K, first, last, N)
            for column in range(left, right, WIDTH):
                part = Region(first, last, column, min(right, column + WIDTH))
                columns = round_up(part.right - column, LANES)
                c = Rows(at(packed.sums, turn * BLOCK_SIZE), WIDTH)
                turn = 1 - turn
                panel = Rows(at(packed.strip, (column - left) * depth), columns)
                if _is_simple(operands, part) and _is_simple(operands, before):
                    rounded = _rounded(operands, at(packed.sums, turn * BLOCK_SIZE), before)
                    multiply_tiles_beside(c, Rows(strip.start, strip.row), panel, depth, rounded)
                else:
                    extent = Extent(last - first, columns, depth)
                    multiply_configured(c, strip, panel, extent, Rows(NULL, 0), NULL, NULL)
                    finish(operands, packed.sums, turn * BLOCK_SIZE, WIDTH, before)
                before = part
        finish(operands, packed.sums, (1 - turn) * BLOCK_SIZE, WIDTH, before)
    end()
    return True
