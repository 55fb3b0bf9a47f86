"""bfloat16 in pairs, as the CPU's dot product takes them: two numbers that follow along K, a word.

A word has the size of a float32 and travels as one. What lies in memory along K is made of words
already; what lies across K is interleaved, two rows at a time, as it is packed.
"""

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from smallmind.kernels.compilation import jit, native
from smallmind.kernels.panels import packed_tile, pieces
from smallmind.kernels.simd import HOST, LANES, at, prefetch, transpose_tile
from smallmind.kernels.tile import (
    FETCHED_AHEAD,
    PANEL_SIGNATURE,
    TILE_ROWS,
    advance,
    tile_chooser,
)
from smallmind.kernels.vector_ir import F32, I16, I32, I64

_choose_tile = tile_chooser(pairs=True)


@native(PANEL_SIGNATURE)
def _panel(
    a, a_tile, a_row, a_column, b, b_row, c, c_row, depth, rows, columns, plus, plus_row, bias,
    packed,
):  # fmt: skip
    for tile in range((rows + TILE_ROWS - 1) // TILE_ROWS):
        row = tile * TILE_ROWS
        _choose_tile(
            (
                advance(a, tile * a_tile), a_row, a_column, b, b_row,
                advance(c, row * c_row), c_row, depth, min(TILE_ROWS, rows - row), columns,
                advance(plus, row * plus_row), plus_row, bias, packed,
            )
        )  # fmt: skip


llvm.add_symbol("smallmind_multiply_pairs", _panel.address)

# As tile.multiply_panel, which see; a, b and depth are in words, and nothing is packed in passing.
multiply_pairs = types.ExternalFunction("smallmind_multiply_pairs", PANEL_SIGNATURE)


@intrinsic
def words(typingctx, array, index):
    """array of bfloat16, flat index -> pointer to the word that starts there."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
        return builder.bitcast(builder.gep(data, [args[1]]), F32.as_pointer())

    return types.CPointer(types.float32)(array, types.int64), codegen


@intrinsic
def _interleave(typingctx, out, target, array, lower, upper, count):
    """LANES words to out: halves array[lower + i] and array[upper + i], zero for i from count on.

    upper < 0: zeros.
    """

    def codegen(context, builder, sig, args):
        out, target, array, lower, upper, count = args
        kind = ir.VectorType(I16, LANES)
        halves = []
        for index in (lower, upper):
            data = context.make_array(sig.args[2])(context, builder, value=array).data
            pointer = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
            absent = builder.icmp_signed("<", index, I64(0))
            mask = HOST.first_lanes(builder, builder.select(absent, I64(0), count))
            name = f"llvm.masked.load.v{LANES}i16.p0"
            types_ = ir.FunctionType(kind, [pointer.type, I32, mask.type, kind])
            function = cgutils.get_or_insert_function(builder.module, types_, name)
            value = builder.call(function, [pointer, I32(2), mask, ir.Constant(kind, None)])
            halves.append(builder.zext(value, HOST.integers))
        shifted = builder.shl(halves[1], HOST.integer(16))
        word = builder.bitcast(builder.or_(halves[0], shifted), HOST.vector)
        place = context.make_array(sig.args[0])(context, builder, value=out).data
        HOST.store(builder, word, builder.gep(place, [target]))
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, n, array, n, n, n), codegen


@intrinsic
def _word(typingctx, array, lower, upper):
    """The word of array[lower] and array[upper]; a half whose index is negative is zero."""

    def codegen(context, builder, sig, args):
        array, lower, upper = args
        data = context.make_array(sig.args[0])(context, builder, value=array).data
        halves = []
        for index in (lower, upper):
            absent = builder.icmp_signed("<", index, I64(0))
            inside = builder.select(absent, lower, index)
            value = builder.load(builder.gep(data, [inside]))
            halves.append(builder.zext(builder.select(absent, I16(0), value), I32))
        word = builder.or_(halves[0], builder.shl(halves[1], I32(16)))
        return builder.bitcast(word, F32)

    return types.float32(array, types.int64, types.int64), codegen


@jit
def pack_word_columns(scratch, place, a, start, end, first, last):
    """a[start:end, first:last] -> words from `place` on, TILE_ROWS columns at a time.

    As panels.pack_columns; K is halved.
    """
    M = a.shape[1]
    depth = pieces(end - start, 2)
    size = packed_tile(depth)
    for k in range(depth):
        row = (start + 2 * k) * M
        for tile in range(pieces(last - first, TILE_ROWS)):
            target = place + tile * size + k * TILE_ROWS
            for v in range(0, TILE_ROWS, LANES):
                column = first + tile * TILE_ROWS + v
                upper = row + M + column if start + 2 * k + 1 < end else -1
                _interleave(scratch, target + v, a, row + column, upper, M - column)


@jit
def pack_word_rows(scratch, b, start, end, column, last, width):
    """b[start:end, column:last] -> words (depth / 2, width), zeros from `last` on."""
    N = b.shape[1]
    for k in range(pieces(end - start, 2)):
        row = (start + 2 * k) * N
        for j in range(0, width, 2 * LANES):  # a cache line
            # Rows of b lie too far apart for the CPU to guess the next.
            prefetch(b, row + FETCHED_AHEAD * N + column + j)
            prefetch(b, row + (FETCHED_AHEAD + 1) * N + column + j)
        for j in range(0, width, LANES):
            upper = row + N + column + j if start + 2 * k + 1 < end else -1
            _interleave(scratch, k * width + j, b, row + column + j, upper, last - column - j)


@jit
def pack_words_transposed(scratch, b, start, end, column, last, width):
    """b[column:last, start:end]^T -> words (depth / 2, width), zeros from `last` on."""
    K = b.shape[1]
    depth = pieces(end - start, 2)
    # Rows of an odd length do not start with a word.
    whole = depth // LANES * LANES if K % 2 == 0 and (end - start) % 2 == 0 else 0
    for j in range(0, width, LANES):
        rows = min(LANES, last - column - j)
        by_tile = whole if rows == LANES else 0
        for k in range(0, by_tile, LANES):
            source = words(b, (column + j) * K + start + 2 * k)
            transpose_tile(source, K // 2, at(scratch, k * width + j), width)
        for k in range(by_tile, depth):
            for lane in range(LANES):
                place = (column + j + lane) * K + start + 2 * k
                upper = place + 1 if start + 2 * k + 1 < end else -1
                word = _word(b, place, upper) if lane < rows else np.float32(0)
                scratch[k * width + j + lane] = word


@jit
def pack_words(scratch, target, row, a, start, end, first, last):
    """a[first:last, start:end] -> words from `target` on, `row` words from a row to the next."""
    K = a.shape[1]
    for i in range(first, last):
        for k in range(pieces(end - start, 2)):
            place = i * K + start + 2 * k
            upper = place + 1 if start + 2 * k + 1 < end else -1
            scratch[target + k] = _word(a, place, upper)
        target += row
