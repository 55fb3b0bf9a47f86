"""Products of bfloat16 on the matrix unit of the CPU: Intel's AMX.

The words are those of `bfloat16_words`; the depth is padded with zeros to a multiple of TILE words.
"""

from smallmind.kernels.codegen.jit import jit, native
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import at, load_first, store
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.amx_tile import TILE, configure, multiply_tiles, release
from smallmind.kernels.gemm.bfloat16_words import interleave, pack_words, words
from smallmind.kernels.gemm.bfloat16_words import pack_b as pack_b
from smallmind.kernels.gemm.packing import TRANSPOSE_A
from smallmind.kernels.gemm.tile import PANEL_SIGNATURE, Rows, Strip, advance

HEIGHT = 2 * TILE  # rows of the result that are multiplied at a time
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


# It comes last because it is compiled when it is defined.
@native("smallmind_multiply_amx", PANEL_SIGNATURE)
def multiply(c, a, b, extent, addend, bias, packed):
    """Computes as `tile.multiply_panel`; a, b and depth are in words, padded and already packed.

    c is written up to whole vectors of columns. bias and packed are NULL.
    """
    for row in range(0, extent.rows, HEIGHT):
        rows = min(HEIGHT, extent.rows - row)
        configure(min(TILE, rows), max(1, rows - TILE))
        for column in range(0, extent.columns, 2 * TILE):
            start = row * addend.stride + column
            multiply_tiles(
                Rows(advance(c.start, row * c.stride + column), c.stride),
                Rows(advance(a.start, row * a.row), a.row),
                Rows(advance(b.start, column), b.stride),
                extent.depth,
                Rows(advance(addend.start, start), addend.stride),
                rows > TILE,
                extent.columns - column > TILE,
            )
    release()
