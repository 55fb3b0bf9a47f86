"""The bfloat16 storage: words of two numbers adjacent along K, as CPUs multiply them.

A word has the size of a float32 and is treated as one. A matrix that is contiguous along K already
consists of words; otherwise its rows are interleaved two at a time as it is packed.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import HOST, LANES, at, prefetch, vector
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.codegen.vector_ir import F32, I16, I32, I64
from smallmind.kernels.gemm.packing import TRANSPOSE_B
from smallmind.kernels.gemm.tile import FETCHED_AHEAD


@intrinsic
def words(typingctx, pointer):
    """Pointer to bfloat16 -> pointer to the words that start there."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], F32.as_pointer())

    return types.CPointer(types.float32)(pointer), codegen


@intrinsic
def interleave(typingctx, out, target, array, lower, upper, count):
    """Writes LANES words: the pairs (array[lower + i], array[upper + i]), zeros for i >= count.

    If upper is negative, the second of each pair is zero.
    """

    def codegen(context, builder, sig, args):
        out, target, array, lower, upper, count = args
        kind = ir.VectorType(I16, LANES)
        data = context.make_array(sig.args[2])(context, builder, value=array).data
        place = context.make_array(sig.args[0])(context, builder, value=out).data

        def write(load):
            lower_half, upper_half = (builder.zext(load(i), HOST.integers) for i in (lower, upper))
            word = builder.or_(lower_half, builder.shl(upper_half, HOST.integer(16)))
            word = builder.bitcast(word, HOST.vector)
            HOST.store(builder, word, builder.gep(place, [target]))

        def load_whole(index):
            pointer = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
            return builder.load(pointer, align=2)

        def load_first(index):
            pointer = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
            absent = builder.icmp_signed("<", index, I64(0))
            mask = HOST.first_lanes(builder, builder.select(absent, I64(0), count))
            name = f"llvm.masked.load.v{LANES}i16.p0"
            zeros = ir.Constant(kind, None)
            return HOST.call(builder, name, kind, pointer, I32(2), mask, zeros)

        if LANES == 16:
            write(load_first)
            return context.get_dummy_value()
        # Without masks in the CPU, each lane would cost a branch.
        is_whole = builder.and_(
            builder.icmp_signed(">=", count, I64(LANES)),
            builder.icmp_signed(">=", upper, I64(0)),
        )
        with builder.if_else(is_whole, likely=True) as (whole, edge):
            with whole:
                write(load_whole)
            with edge:
                write(load_first)
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, n, array, n, n, n), codegen


@intrinsic
def interleave_whole(typingctx, out, lower, upper):
    """Writes LANES words, pairs of an element from each of two rows. Takes pointers."""

    def codegen(context, builder, sig, args):
        out, *rows = args
        kind, halves = ir.VectorType(I16, LANES), []
        for row in rows:
            half = builder.load(builder.bitcast(row, kind.as_pointer()), align=2)
            halves.append(builder.zext(half, HOST.integers))
        word = builder.or_(halves[0], builder.shl(halves[1], HOST.integer(16)))
        HOST.store(builder, builder.bitcast(word, HOST.vector), out)
        return context.get_dummy_value()

    return types.void(out, lower, upper), codegen


@intrinsic
def _word(typingctx, array, lower, upper):
    """The pair (array[lower], array[upper]); the second is zero if upper is negative."""

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


@intrinsic
def bfloat16_at(typingctx, words, index):
    """pointer to words, index -> pointer to the bfloat16 with which the word at it begins."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.gep(args[0], [args[1]]), I16.as_pointer())

    return types.CPointer(types.int16)(words, types.int64), codegen


@intrinsic
def round_two(typingctx, first, second):
    """Two vectors -> as many words: all of the first in bfloat16, then all of the second."""

    def codegen(context, builder, sig, args):
        return HOST.round_two(builder, *args)

    return vector(vector, vector), codegen


@intrinsic
def zip_halves(typingctx, both):
    """The result of `round_two` -> words of one element of the first and one of the second."""

    def codegen(context, builder, sig, args):
        return HOST.zip_halves(builder, args[0])

    return vector(vector), codegen


@intrinsic
def store_halves(typingctx, words, first, second, both):
    """The result of `round_two` -> the numbers of the first from one word on, then the others."""

    def codegen(context, builder, sig, args):
        pointer, first, second, both = args
        for index, is_second in ((first, False), (second, True)):
            half = HOST.half_of(builder, both, is_second)
            place = builder.bitcast(builder.gep(pointer, [index]), half.type.as_pointer())
            builder.store(half, place, align=4)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64, vector), codegen


@jit
def pack_b(panel, b, variant, start, end, left, right, depth):
    """K start..end, columns left..right of the right operand -> words (depth, whole vectors)."""
    if variant == TRANSPOSE_B:
        pack_words_transposed(panel, b, start, end, left, right, depth)
    else:
        pack_word_rows(panel, b, start, end, left, right, depth)


@jit
def pack_word_rows(panel, b, start, end, column, last, depth):
    """b[start:end, column:last] -> words (depth, whole vectors), zeros from `end` and `last` on."""
    N = b.shape[1]
    width = round_up(last - column, LANES)
    for k in range(depth):
        row = (start + 2 * k) * N
        for j in range(0, width, 2 * LANES):  # a cache line
            # Rows of b are too far apart for the CPU to predict the next.
            prefetch(b, row + FETCHED_AHEAD * N + column + j)
            prefetch(b, row + (FETCHED_AHEAD + 1) * N + column + j)
        whole = (last - column) // LANES * LANES if start + 2 * k + 1 < end else 0
        for j in range(0, whole, LANES):
            lower = row + column + j
            interleave_whole(at(panel, k * width + j), at(b, lower), at(b, lower + N))
        for j in range(whole, width, LANES):
            upper = row + N + column + j if start + 2 * k + 1 < end else -1
            count = last - column - j if start + 2 * k < end else 0
            interleave(panel, k * width + j, b, row + column + j, upper, count)


@jit
def pack_words_transposed(panel, b, start, end, column, last, depth):
    """The transpose b[column:last, start:end]^T -> words, as from `pack_word_rows`."""
    K = b.shape[1]
    width = round_up(last - column, LANES)
    # Rows of an odd length do not start with a word.
    whole = (end - start) // 2 // LANES * LANES if K % 2 == 0 and (end - start) % 2 == 0 else 0
    for j in range(0, width, LANES):
        rows = min(LANES, last - column - j)
        by_tile = whole if rows == LANES else 0
        for k in range(0, by_tile, LANES):
            source = words(at(b, (column + j) * K + start + 2 * k))
            transpose_tile(source, K // 2, at(panel, k * width + j), width)
        for k in range(by_tile, depth):
            for lane in range(LANES):
                place = (column + j + lane) * K + start + 2 * k
                upper = place + 1 if start + 2 * k + 1 < end else -1
                is_inside = lane < rows and start + 2 * k < end
                word = _word(b, place, upper) if is_inside else np.float32(0)
                panel[k * width + j + lane] = word


@jit
def pack_words(strip, row, a, start, end, first, last):
    """a[first:last, start:end] -> words in strip, with `row` words between rows."""
    K = a.shape[1]
    target = 0
    for i in range(first, last):
        for k in range(ceil_div(end - start, 2)):
            place = i * K + start + 2 * k
            upper = place + 1 if start + 2 * k + 1 < end else -1
            strip[target + k] = _word(a, place, upper)
        target += row
