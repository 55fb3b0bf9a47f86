"""Products of rows that are rounded to 8 bits with blocks of small integers.

A row is rounded block by block. LANES rows of blocks at a time are transposed into a panel, words of
four integers with a lane for each row, which is multiplied by any number of rounded rows. The
products of a block are summed in integers, exactly, then scaled and added in float32.
Multiplications and additions are rounded one by one, so that every instruction set, and NumPy,
computes the same bits; those of a row do not depend on other rows.
"""

import functools

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from smallmind.kernels.codegen.blocks import SCALE, SIZES, block_bytes
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import called_jit, jit, parallel_jit
from smallmind.kernels.codegen.operation import element_pointer
from smallmind.kernels.codegen.rounding import round_up, row_share
from smallmind.kernels.codegen.simd import HOST, at, borrow, load, load_first, share, store_first
from smallmind.kernels.codegen.transpose import store_transposed
from smallmind.kernels.codegen.vector_ir import F32, I8, I32, I64
from smallmind.kernels.gemm.tile import FLOAT_POINTER, LINE, write_loop
from smallmind.kernels.number_types import BLOCK, HALF
from smallmind.kernels.reference import SMALLEST

LANES = ISA.lanes
WORDS = BLOCK // 4  # of the integers of a block
MAX_ROWS = 8 if ISA.tile_vectors == 4 else 4  # whose sums are in registers: of 32, and of 16
# In scratch a rounded row is the integers of all its blocks, what their sums start from, and their
# scales; a panel is the integers of LANES rows, word by word, and their scales.

_BYTES = ir.VectorType(I8, 4 * LANES)


@called_jit
def row_size(blocks):
    """Returns the words of a rounded row in scratch: whole lines of the cache."""
    return round_up((WORDS + 2) * blocks, LINE)


@called_jit
def panel_size(blocks):
    """Returns the words of a panel, with its scales, and of results."""
    return (round_up(blocks, 2) * (WORDS + 1) + MAX_ROWS) * LANES


def scratch_size(R: int, blocks: int, is_few: bool, workers: int) -> int:
    """Returns the words of scratch for rounded rows, of each worker if they are few, and panels."""
    return (workers if is_few else 1) * R * row_size(blocks) + workers * panel_size(blocks)


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


def _integers(builder, kind, blocks):
    """Pointers to two blocks -> vectors of all their integers, plus the offset."""
    places = [builder.gep(block, [I64(SCALE)]) for block in blocks]
    if kind == types.int8:
        if LANES == 16:
            first, second = (_vector(builder, place, I8, BLOCK) for place in places)
            parts = [_shuffle(builder, first, second, range(2 * BLOCK))]
        else:
            size = 4 * LANES
            parts = [
                _vector(builder, builder.gep(place, [I64(start)]), I8, size)
                for place in places
                for start in range(0, BLOCK, size)
            ]
        if not HOST.unsigned_dots:
            return parts
        # As a number with a sign this byte is its opposite.
        high = ir.Constant(_BYTES, [ir.Constant(I8, 0x80)] * 4 * LANES)
        return [builder.xor(part, high) for part in parts]
    halves = [_vector(builder, place, I8, HALF) for place in places]
    if LANES == 16:
        order = [HALF * number + i for number in (0, 0, 1, 1) for i in range(HALF)]
        parts = [_shuffle(builder, halves[0], halves[1], order)]
        shifts = [([0] * 4 + [4] * 4) * 2]
    elif LANES == 8:
        parts = [_shuffle(builder, half, half, [*range(HALF)] * 2) for half in halves]
        shifts = [[0] * 4 + [4] * 4] * 2
    else:
        parts, shifts = [half for half in halves for _ in range(2)], [[0] * 4, [4] * 4] * 2
    found = []
    for part, shift in zip(parts, shifts, strict=True):
        words = builder.bitcast(part, HOST.integers)
        words = builder.lshr(words, ir.Constant(HOST.integers, shift))
        words = builder.and_(words, HOST.integer(0x0F0F0F0F))
        found.append(builder.bitcast(words, _BYTES))
    return found


@intrinsic
def _pack_pair(typingctx, panel, scales, w, place, ahead, last, is_pair):
    """Writes two blocks of LANES rows, transposed, or one; and prefetches as much.

    place: of the first, in bytes; ahead: of what is packed later. Rows after the last one repeat
    it, as what is beyond it is not read.
    """

    def codegen(context, builder, sig, args):
        panel, scales, w, place, ahead, last, is_pair = args
        kind, size = sig.args[2].dtype, SIZES[sig.args[2].dtype]
        shape = context.make_array(sig.args[2])(context, builder, w).shape
        row = builder.extract_value(shape, 1)
        start = element_pointer(context, builder, sig.args[2], w, ahead)
        for line in range(0, 2 * LANES * size, 4 * LINE):
            HOST.prefetch(builder, builder.gep(start, [I64(line)]), locality=2)
        pairs = []
        for i in range(LANES):
            number = builder.select(builder.icmp_signed("<", I64(i), last), I64(i), last)
            index = builder.add(place, builder.mul(number, row))
            first = element_pointer(context, builder, sig.args[2], w, index)
            second = builder.select(is_pair, builder.gep(first, [I64(size)]), first)
            pairs.append((first, second))
        rows = [_integers(builder, kind, pair) for pair in pairs]
        for number, part in enumerate(zip(*rows, strict=True)):
            target = builder.gep(panel, [I64(number * LANES * LANES)])
            words = [builder.bitcast(x, HOST.vector) for x in part]
            store_transposed(builder, words, target, I64(LANES))
        for number, blocks in enumerate(zip(*pairs, strict=True)):
            target = builder.gep(scales, [I64(number * LANES)])
            HOST.store(builder, HOST.load_scales(builder, blocks), target)
        return context.get_dummy_value()

    number = types.int64
    start = FLOAT_POINTER
    return types.void(start, start, w, number, number, number, types.boolean), codegen


def _multiply_rows(count):
    """-> an intrinsic: writes the products of `count` rounded rows and a panel to results.

    rows: the first, `stride` words from the next; results: LANES of each row.
    """

    @intrinsic
    def multiply(typingctx, results, rows, stride, panel, scales, blocks):
        def codegen(context, builder, sig, args):
            results, first, stride, panel, scales, blocks = args
            rows = [builder.gep(first, [builder.mul(stride, I64(i))]) for i in range(count)]
            starts = builder.mul(blocks, I64(WORDS))

            def splat(row, index, kind):
                place = builder.bitcast(builder.gep(row, [index]), kind.as_pointer())
                return HOST.splat(builder, builder.load(place, align=4))

            def add(block, totals):
                start = builder.add(starts, block)
                sums = [splat(row, start, I32) for row in rows]
                word = builder.mul(block, I64(WORDS))
                for number in range(WORDS):
                    index = builder.add(word, I64(number))
                    w = HOST.load(builder, builder.gep(panel, [builder.mul(index, I64(LANES))]))
                    for i, row in enumerate(rows):
                        operands = builder.bitcast(w, _BYTES), splat(row, index, I32)
                        operands = (builder.bitcast(x, _BYTES) for x in operands)
                        sums[i] = HOST.dot_bytes(builder, sums[i], *operands)
                w = HOST.load(builder, builder.gep(scales, [builder.mul(block, I64(LANES))]))
                place, added = builder.add(start, blocks), []
                for row, integers, total in zip(rows, sums, totals, strict=True):
                    scale = builder.fmul(splat(row, place, F32), w)
                    term = builder.fmul(builder.sitofp(integers, HOST.vector), scale)
                    added.append(builder.fadd(total, term))
                return added

            zeros = [HOST.constant(0.0)] * count
            _, totals = write_loop(builder, HOST, I64(0), blocks, 1, zeros, add, None)
            for i, total in enumerate(totals):
                HOST.store(builder, total, builder.gep(results, [I64(i * LANES)]))
            return context.get_dummy_value()

        start, number = FLOAT_POINTER, types.int64
        return types.void(start, start, number, start, start, number), codegen

    return multiply


_multiply_one, _multiply_two, _multiply_four = map(_multiply_rows, (1, 2, 4))
_multiply_most = _multiply_rows(MAX_ROWS)


@parallel_jit
def round_rows(rows, a, w, workers):
    """Writes the rows of a, rounded for products with blocks like those of w. rows: scratch."""
    for worker in prange(workers):
        first, last = row_share(a.shape[0], np.int64(worker), workers)
        _round_rows(at(rows, 0), borrow(a), borrow(w), first, last)


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
def multiply_rounded(out, a, w, bias, addend, scratch, is_few, workers):
    """Computes out = a w^T [+ bias] [+ addend]. scratch: see `scratch_size`.

    Each worker rounds all rows if they are few; otherwise `round_rows` has done it.
    """
    for worker in prange(workers):
        R, N, blocks = a.shape[0], w.shape[0], a.shape[1] // BLOCK
        size, number = R * row_size(blocks), np.int64(worker)
        rows = at(scratch, number * size if is_few else 0)
        own = at(scratch, (workers if is_few else 1) * size + number * panel_size(blocks))
        first, last = share(N, number, workers)
        if first < last:
            if is_few:
                _round_rows(rows, borrow(a), borrow(w), 0, R)
            operands = borrow(out), rows, borrow(w), borrow(bias), borrow(addend)
            _multiply(*operands, own, first, last)


@jit
def _multiply(out, rows, w, bias, addend, panel, first, last):
    """Columns first..last of the product, LANES at a time. rows and panel: scratch."""
    (R, N), size = out.shape, w.shape[1]
    blocks = size // block_bytes(w)
    stride = row_size(blocks)
    scales = at(panel, round_up(blocks, 2) * WORDS * LANES)
    results = at(scales, round_up(blocks, 2) * LANES)
    for j in range(first, last, LANES):
        count = min(LANES, last - j)
        for n in range(0, blocks, 2):
            words, place = at(panel, n * WORDS * LANES), j * size + n * block_bytes(w)
            ahead = (j + LANES) * size + n * block_bytes(w) * LANES
            is_pair = n + 1 < blocks
            _pack_pair(words, at(scales, n * LANES), w, place, ahead, count - 1, is_pair)
        i = 0
        while i < R:
            start, rest = at(rows, i * stride), R - i
            if rest >= MAX_ROWS:
                done = MAX_ROWS
                _multiply_most(results, start, stride, panel, scales, blocks)
            elif rest >= 4:
                done = 4
                _multiply_four(results, start, stride, panel, scales, blocks)
            elif rest >= 2:
                done = 2
                _multiply_two(results, start, stride, panel, scales, blocks)
            else:
                done = 1
                _multiply_one(results, start, stride, panel, scales, blocks)
            for n in range(done):
                total, place = load(results, n * LANES), (i + n) * N + j
                if bias.size > 0:
                    total = total + load_first(bias, j, count)
                if addend.size > 0:
                    total = total + load_first(addend, place, count)
                store_first(out, place, total, count)
            i += done
