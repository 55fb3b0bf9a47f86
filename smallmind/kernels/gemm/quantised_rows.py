"""Products of rows that are rounded to 8 bits with blocks of small integers.

A row is rounded block by block. Rows of blocks are multiplied in groups, whose words of four
integers lie row beside row, so that each is a lane: see `number_types.in_groups`. Models that only
run keep their matrices like this; otherwise a group is made in scratch.

The products of a block are summed in integers, exactly, then scaled and added in float32.
Multiplications and additions are rounded one by one, so that every instruction set, and NumPy,
computes the same bits; those of a row do not depend on other rows.
"""

import functools

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from smallmind.kernels.codegen.blocks import (
    SCALE,
    SIZES,
    block_bytes,
    bytes_from,
    copy_scale,
    copy_word,
)
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import called_jit, jit, parallel_jit
from smallmind.kernels.codegen.operation import element_pointer
from smallmind.kernels.codegen.rounding import ceil_div, round_up, row_share
from smallmind.kernels.codegen.simd import HOST, at, borrow, load, load_first, store_first
from smallmind.kernels.codegen.vector_ir import F32, I8, I32, I64, Storage
from smallmind.kernels.gemm.tile import FLOAT_POINTER, LINE, write_loop
from smallmind.kernels.number_types import BLOCK, GROUP
from smallmind.kernels.reference import SMALLEST

LANES = ISA.lanes
WORDS = BLOCK // 4  # of the integers of a block
MAX_ROWS = 8 if ISA.tile_vectors == 4 else 4  # whose sums are in registers: of 32, and of 16
RESULTS = MAX_ROWS * LANES  # words of scratch, before all else
# Bytes from what is multiplied to what is prefetched, in a stream from memory.
PREFETCH_BYTES = 8192
# In scratch a rounded row is the integers of all its blocks, what their sums start from, and their
# scales.

_BYTES = ir.VectorType(I8, 4 * LANES)


@called_jit
def row_size(blocks):
    """Returns the words of a rounded row in scratch: whole lines of the cache."""
    return round_up((WORDS + 2) * blocks, LINE)


def scratch_size(a: np.ndarray, w: np.ndarray) -> int:
    """Returns the words of scratch that a thread needs: results, a group, and the rounded rows."""
    return RESULTS + w.shape[1] * GROUP // 4 + len(a) * row_size(a.shape[1] // BLOCK)


def _offset(kind):
    """-> how much larger than the integers of this kind of block are those that are multiplied."""
    if kind == types.uint8:
        return 8
    return 128 if HOST.unsigned_dots else 0


def _vector(builder, pointer, kind, count):
    place = builder.bitcast(pointer, ir.VectorType(kind, count).as_pointer())
    return builder.load(place, align=1)


def _shuffle(builder, a, b, order):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), list(order)))


def _round_block(builder, out, start_place, scale_place, values, offset):
    """Writes a rounded block, as the plain twin does."""
    places = [builder.gep(values, [I64(k)]) for k in range(0, BLOCK, LANES)]
    x = [HOST.load(builder, place) for place in places]
    magnitudes = [
        builder.and_(builder.bitcast(value, HOST.integers), HOST.integer(0x7FFFFFFF)) for value in x
    ]

    def larger(a, b):  # as bits: so that NaN is the largest
        return builder.select(builder.icmp_unsigned(">", a, b), a, b)

    most = magnitudes[0]
    for value in magnitudes[1:]:
        most = larger(most, value)
    bits = HOST.fold(builder, most, larger)
    largest = builder.bitcast(bits, F32)
    is_finite = builder.icmp_unsigned("<", bits, I32(0x7F800000))
    is_zero = builder.icmp_unsigned("<", bits, I32(int(np.float32(SMALLEST).view(np.uint32))))
    scale = builder.select(is_zero, F32(0.0), builder.fdiv(largest, F32(127.0)))
    inverse = builder.select(is_zero, F32(0.0), builder.fdiv(F32(127.0), largest))
    inverse, is_finite = HOST.splat(builder, inverse), HOST.splat(builder, is_finite)
    integers = builder.bitcast(out, I8.as_pointer())
    for k, value in enumerate(x):
        nearest = HOST.nearest(builder, builder.fmul(value, inverse))
        nearest = builder.select(is_finite, nearest, HOST.constant(0.0))
        narrow = builder.trunc(builder.fptosi(nearest, HOST.integers), ir.VectorType(I8, LANES))
        place = builder.gep(integers, [I64(k * LANES)])
        builder.store(narrow, builder.bitcast(place, narrow.type.as_pointer()), align=1)
    words = _vector(builder, out, I32, WORDS)
    total = ir.Constant(words.type, None)
    for byte in range(4):
        up, down = (ir.Constant(words.type, [by] * WORDS) for by in (24 - 8 * byte, 24))
        total = builder.add(total, builder.ashr(builder.shl(words, up), down))
    lanes = [builder.extract_element(total, I32(lane)) for lane in range(WORDS)]
    start = builder.mul(functools.reduce(builder.add, lanes), I32(-offset))
    builder.store(start, builder.bitcast(start_place, I32.as_pointer()), align=4)
    builder.store(scale, scale_place, align=4)


@intrinsic
def _round_values(typingctx, w, out, start, scale, a, index):
    """Rounds BLOCK values of a from a flat index on, for products with blocks like those of w."""

    def codegen(context, builder, sig, args):
        _, out, start, scale, a, index = args
        values = element_pointer(context, builder, sig.args[4], a, index)
        _round_block(builder, out, start, scale, values, _offset(w.dtype))
        return context.get_dummy_value()

    return types.void(w, *[FLOAT_POINTER] * 3, a, types.int64), codegen


@jit
def _move_group(group, w, first, last, is_back):
    """Copies GROUP rows of blocks from number `first` on to a group, or back. Takes a pointer.

    Rows after the last one repeat it, as what is beyond it is not read.
    """
    row, size = w.shape[1], block_bytes(w)
    words, blocks = (size - SCALE) // 4, row // size
    integers = at(group, blocks * SCALE * GROUP)
    for i in range(GROUP):
        for n in range(blocks):
            block = at(w, min(first + i, last) * row + n * size)
            scale = at(group, (n * GROUP + i) * SCALE)
            if is_back:
                copy_scale(block, scale)
            else:
                copy_scale(scale, block)
            for k in range(words):
                place = at(block, SCALE + 4 * k)
                word = at(integers, 4 * ((n * words + k) * GROUP + i))
                if is_back:
                    copy_word(place, word)
                else:
                    copy_word(word, place)


@parallel_jit
def arrange(w, is_back, scratch):
    """Makes groups of rows, in place, or rows of groups; rows that fill no group stay rows."""
    workers, size = scratch.shape[0], w.shape[1]
    for worker in prange(workers):
        group = bytes_from(w, at(scratch, np.int64(worker) * scratch.shape[1]))
        first, last = row_share(w.shape[0] // GROUP, np.int64(worker), workers)
        for start in range(first * GROUP, last * GROUP, GROUP):
            whole = at(w, start * size)
            if not is_back:
                _move_group(group, w, start, start + GROUP, False)
            for byte in range(0, GROUP * size, 4):
                if is_back:
                    copy_word(at(group, byte), at(whole, byte))
                else:
                    copy_word(at(whole, byte), at(group, byte))
            if is_back:
                _move_group(group, w, start, start + GROUP, True)


def _integers(builder, kind, words):
    """-> the integers of each word of a block, plus the offset. words: a pointer to the first."""
    count = (SIZES[kind] - SCALE) // 4
    places = [builder.gep(words, [I64(4 * GROUP * k)]) for k in range(count)]
    found = [_vector(builder, place, I32, LANES) for place in places]
    if kind == types.uint8:
        halves = found, [builder.lshr(x, HOST.integer(4)) for x in found]
        found = [builder.and_(x, HOST.integer(0x0F0F0F0F)) for half in halves for x in half]
    elif HOST.unsigned_dots:
        # As a number with a sign this byte is its opposite.
        high = HOST.integer(0x80808080 - 2**32)
        found = [builder.xor(x, high) for x in found]
    return [builder.bitcast(x, _BYTES) for x in found]


def _multiply_rows(count):
    """-> an intrinsic: writes the products of `count` rounded rows and LANES of a group to results.

    rows: the first, `stride` words from the next; group: a pointer; lane: the first of LANES.
    """

    @intrinsic
    def multiply(typingctx, results, rows, stride, group, lane, blocks):
        def codegen(context, builder, sig, args):
            results, first, stride, group, lane, blocks = args
            kind = sig.args[3].dtype
            rows = [builder.gep(first, [builder.mul(stride, I64(i))]) for i in range(count)]
            step = (SIZES[kind] - SCALE) * GROUP  # bytes from a block to the next
            integers = builder.gep(group, [builder.mul(blocks, I64(SCALE * GROUP))])
            integers = builder.gep(integers, [builder.mul(lane, I64(4))])
            scales = builder.gep(group, [builder.mul(lane, I64(SCALE))])
            starts = builder.mul(blocks, I64(WORDS))

            def splat(row, index, kind):
                place = builder.bitcast(builder.gep(row, [index]), kind.as_pointer())
                return HOST.splat(builder, builder.load(place, align=4))

            def add(block, totals):
                start, first = builder.add(starts, block), builder.mul(block, I64(WORDS))
                sums = [splat(row, start, I32) for row in rows]
                place = builder.gep(integers, [builder.mul(block, I64(step))])
                for ahead in range(PREFETCH_BYTES, PREFETCH_BYTES + step, 4 * LINE):
                    HOST.prefetch(builder, builder.gep(place, [I64(ahead)]), locality=2)
                for number, w in enumerate(_integers(builder, kind, place)):
                    index = builder.add(first, I64(number))
                    for i, row in enumerate(rows):
                        q = builder.bitcast(splat(row, index, I32), _BYTES)
                        sums[i] = HOST.dot_bytes(builder, sums[i], w, q)
                place = builder.gep(scales, [builder.mul(block, I64(SCALE * GROUP))])
                w = HOST.load(builder, place, Storage.FLOAT16)
                place, added = builder.add(start, blocks), []
                for row, dots, total in zip(rows, sums, totals, strict=True):
                    scale = builder.fmul(splat(row, place, F32), w)
                    term = builder.fmul(builder.sitofp(dots, HOST.vector), scale)
                    added.append(builder.fadd(total, term))
                return added

            zeros = [HOST.constant(0.0)] * count
            _, totals = write_loop(builder, HOST, I64(0), blocks, 1, zeros, add, None)
            for i, total in enumerate(totals):
                HOST.store(builder, total, builder.gep(results, [I64(i * LANES)]))
            return context.get_dummy_value()

        start, number = FLOAT_POINTER, types.int64
        return types.void(start, start, number, group, number, number), codegen

    return multiply


_multiply_one, _multiply_two, _multiply_four = map(_multiply_rows, (1, 2, 4))
_multiply_most = _multiply_rows(MAX_ROWS)


@parallel_jit
def round_rows(scratch, a, w, workers):
    """Writes the rows of a, rounded for products with blocks like those of w."""
    for worker in prange(workers):
        first, last = row_share(a.shape[0], np.int64(worker), workers)
        rounded = at(scratch, RESULTS + w.shape[1] * GROUP // 4)
        _round_rows(rounded, borrow(a), borrow(w), first, last)


@jit
def _round_rows(rows, a, w, first, last):
    K = a.shape[1]
    blocks = K // BLOCK
    for i in range(first, last):
        row = at(rows, i * row_size(blocks))
        for n in range(blocks):
            start = WORDS * blocks + n
            words, scale = at(row, n * WORDS), at(row, start + blocks)
            _round_values(w, words, at(row, start), scale, a, i * K + n * BLOCK)


@parallel_jit
def multiply_rounded(out, a, w, bias, addend, scratch, is_few, in_groups):
    """Computes out = a w^T [+ bias] [+ addend]. scratch (workers, scratch_size).

    Each worker rounds all rows if they are few; otherwise `round_rows` has done it. in_groups: if
    w is already.
    """
    workers = scratch.shape[0]
    for worker in prange(workers):
        first, last = row_share(ceil_div(w.shape[0], GROUP), np.int64(worker), workers)
        own, rows = at(scratch, np.int64(worker) * scratch.shape[1]), at(scratch, 0)
        if is_few:
            rows = own
        rows = at(rows, RESULTS + w.shape[1] * GROUP // 4)
        if first < last:
            if is_few:
                _round_rows(rows, borrow(a), borrow(w), 0, a.shape[0])
            operands = borrow(out), rows, borrow(w), borrow(bias), borrow(addend)
            _multiply(*operands, own, first, last, in_groups)


@jit
def _multiply(out, rows, w, bias, addend, own, first, last, in_groups):
    """Writes the groups first..last of the columns of the product. own: scratch."""
    N, size = w.shape
    for number in range(first, last):
        begin = number * GROUP
        group = at(w, begin * size)
        if not in_groups or begin + GROUP > N:
            group = bytes_from(w, at(own, RESULTS))
            _move_group(group, w, begin, N - 1, False)
        for j in range(begin, min(N, begin + GROUP), LANES):
            _multiply_lanes(out, rows, w, bias, addend, own, group, j)


@jit
def _multiply_lanes(out, rows, w, bias, addend, results, group, j):
    """Writes LANES columns of the product, from number j on."""
    R, N = out.shape
    blocks, lane, count = w.shape[1] // block_bytes(w), j % GROUP, min(LANES, N - j)
    i, stride = 0, row_size(blocks)
    while i < R:
        start, rest = at(rows, i * stride), R - i
        if rest >= MAX_ROWS:
            done = MAX_ROWS
            _multiply_most(results, start, stride, group, lane, blocks)
        elif rest >= 4:
            done = 4
            _multiply_four(results, start, stride, group, lane, blocks)
        elif rest >= 2:
            done = 2
            _multiply_two(results, start, stride, group, lane, blocks)
        else:
            done = 1
            _multiply_one(results, start, stride, group, lane, blocks)
        for n in range(done):
            total, place = load(results, n * LANES), (i + n) * N + j
            if bias.size > 0:
                total = total + load_first(bias, j, count)
            if addend.size > 0:
                total = total + load_first(addend, place, count)
            store_first(out, place, total, count)
        i += done
