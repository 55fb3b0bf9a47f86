"""The bfloat16 storage: words of two numbers adjacent along K, as CPUs multiply them.

A word has the size of a float32 and is treated as one. A matrix that is contiguous along K already
consists of words; otherwise its rows are interleaved two at a time as it is packed.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.operation import PLACE, operation
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import HOST, LANES, at, on_vectors, prefetch, vector
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.codegen.vector_ir import F32, I16, I32, I64
from smallmind.kernels.gemm.packing import TRANSPOSE_B, PackedPanel
from smallmind.kernels.gemm.tile import FETCHED_AHEAD, NULL, Rows

_WORDS, _NUMBERS = types.CPointer(types.float32), types.CPointer(types.int16)


@operation(_WORDS, _NUMBERS)
def words(builder, pointer):
    """Pointer to bfloat16 -> pointer to the words that start there."""
    return builder.bitcast(pointer, F32.as_pointer())


@intrinsic
def bfloat16_or_null(typingctx, array, index):
    """-> the pointer to an element, or NULL in an empty array and in one that is not bfloat16."""
    null = ir.Constant(I16.as_pointer(), None)

    def codegen(context, builder, sig, args):
        if array.dtype != types.int16:
            return null
        of = context.make_array(array)(context, builder, value=args[0])
        is_empty = builder.icmp_signed("==", of.nitems, I64(0))
        return builder.select(is_empty, null, builder.gep(of.data, [args[1]]))

    return _NUMBERS(array, types.int64), codegen


@intrinsic
def is_bfloat16(typingctx, array):
    """Returns true, as a constant, if an array is of bfloat16."""
    found = ir.Constant(ir.IntType(1), int(array.dtype == types.int16))
    return types.boolean(array), lambda _context, _builder, _sig, _args: found


@operation(types.void, PLACE, PLACE, types.int64, types.int64)
def interleave(builder, out, lower, step, count):
    """Writes LANES words: pairs of a number and the one `step` behind it, zeros from `count` on.

    If step is 0, the second of each pair is zero.
    """
    kind = ir.VectorType(I16, LANES)
    upper = builder.gep(lower.pointer, [step])
    is_present = builder.icmp_signed("!=", step, I64(0))
    rows = (lower.pointer, count), (upper, builder.select(is_present, count, I64(0)))

    def write(load):
        lower_half, upper_half = (builder.zext(load(*row), HOST.integers) for row in rows)
        word = builder.or_(lower_half, builder.shl(upper_half, HOST.integer(16)))
        HOST.store(builder, builder.bitcast(word, HOST.vector), out.pointer)

    def load_whole(pointer, _count):
        return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=2)

    def load_first(pointer, count):
        pointer, mask = (
            builder.bitcast(pointer, kind.as_pointer()),
            HOST.first_lanes(builder, count),
        )
        name, zeros = f"llvm.masked.load.v{LANES}i16.p0", ir.Constant(kind, None)
        return HOST.call(builder, name, kind, pointer, I32(2), mask, zeros)

    if LANES == 16:
        write(load_first)
        return
    # Without masks in the CPU, each lane would cost a branch.
    is_whole = builder.and_(builder.icmp_signed(">=", count, I64(LANES)), is_present)
    with builder.if_else(is_whole, likely=True) as (whole, edge):
        with whole:
            write(load_whole)
        with edge:
            write(load_first)


@operation(types.void, _WORDS, _NUMBERS, _NUMBERS)
def interleave_whole(builder, out, *rows):
    """Writes LANES words, pairs of an element from each of two rows. Takes pointers."""
    kind, halves = ir.VectorType(I16, LANES), []
    for row in rows:
        half = builder.load(builder.bitcast(row, kind.as_pointer()), align=2)
        halves.append(builder.zext(half, HOST.integers))
    word = builder.or_(halves[0], builder.shl(halves[1], HOST.integer(16)))
    HOST.store(builder, builder.bitcast(word, HOST.vector), out)


@operation(types.float32, PLACE, types.boolean)
def _word(builder, place, is_whole):
    """Returns a number and the one behind it; zero instead of that if it is not whole."""
    following = builder.gep(place.pointer, [builder.zext(is_whole, I64)])
    upper = builder.select(is_whole, builder.load(following), I16(0))
    lower_half, upper_half = (builder.zext(x, I32) for x in (builder.load(place.pointer), upper))
    word = builder.or_(lower_half, builder.shl(upper_half, I32(16)))
    return builder.bitcast(word, F32)


@operation(_NUMBERS, _WORDS)
def numbers(builder, pointer):
    """Pointer to words -> pointer to the bfloat16 with which they begin."""
    return builder.bitcast(pointer, I16.as_pointer())


round_two = on_vectors(HOST.round_two)
zip_halves = on_vectors(HOST.zip_halves)


@operation(types.void, _WORDS, _WORDS, vector)
def store_halves(builder, first, second, both):
    """The result of `round_two` -> the numbers of the first at a place, the others at another."""
    for pointer, is_second in ((first, False), (second, True)):
        half = HOST.half_of(builder, both, is_second)
        builder.store(half, builder.bitcast(pointer, half.type.as_pointer()), align=4)


@jit
def pack_b(b, panel, variant, start, end, region, depth):
    """K start..end, columns of a region, of the right operand -> PackedPanel of words."""
    left, right = region.left, region.right
    if variant == TRANSPOSE_B:
        pack_words_transposed(panel, b, start, end, left, right, depth)
    else:
        pack_word_rows(panel, b, start, end, left, right, depth)
    return PackedPanel(Rows(at(panel, 0), round_up(right - left, LANES)), NULL)


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
            step = N if start + 2 * k + 1 < end else 0
            count = last - column - j if start + 2 * k < end else 0
            interleave(panel, k * width + j, b, row + column + j, step, count)


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
                is_inside = lane < rows and start + 2 * k < end
                is_whole = start + 2 * k + 1 < end
                word = _word(b, place, is_whole) if is_inside else np.float32(0)
                panel[k * width + j + lane] = word


@jit
def pack_words(strip, row, a, start, end, first, last):
    """a[first:last, start:end] -> words in strip, with `row` words between rows."""
    K = a.shape[1]
    target = 0
    for i in range(first, last):
        for k in range(ceil_div(end - start, 2)):
            place = start + 2 * k
            strip[target + k] = _word(a, i * K + place, place + 1 < end)
        target += row
