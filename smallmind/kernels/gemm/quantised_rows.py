"""Products of few rows with blocks of small integers: limited by reading the blocks.

Rows of the left operand are multiplied by dequantised blocks, or rounded to 8 bits, block by block,
and multiplied in integers. The integers of a block are then multiplied in groups of four, whose
exact sums are scaled and added in float32: 16 such sums of two blocks, which are a register of
AVX-512, two of AVX2, four of NEON. Multiplications and additions are rounded one by one, so that
every instruction set, and NumPy, computes the same bits.
"""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from smallmind.kernels.codegen.blocks import SCALE, SIZES, block_bytes, block_values
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import called_jit, jit, parallel_jit
from smallmind.kernels.codegen.operation import element_pointer
from smallmind.kernels.codegen.rounding import ceil_div, round_up, row_share
from smallmind.kernels.codegen.simd import HOST, at, borrow
from smallmind.kernels.codegen.vector_ir import F32, I8, I16, I32, I64
from smallmind.kernels.gemm.tile import FLOAT_POINTER, LINE, NULL, Rows, write_loop
from smallmind.kernels.number_types import BLOCK, HALF
from smallmind.kernels.reference import SMALLEST

LANES = ISA.lanes
SUMS = 16  # of two blocks
# Bytes from the blocks that are multiplied to those that are prefetched, into the second-level
# cache: some CPUs do not fetch a row of blocks far enough ahead by themselves.
PREFETCH_BYTES = 2048
SUM_REGISTERS = SUMS // LANES  # registers that hold them
# Two blocks of a rounded row in scratch, in words: their integers, and what each of their sums
# starts from. The scales of all its blocks follow.
INTEGERS, STARTS, PAIR = 0, SUMS, 2 * SUMS
# Scratch before the rounded rows, in words: a block of zeros, and results.
ZEROS, RESULTS, ROWS = 0, 16, 32

_BYTES = ir.VectorType(I8, 4 * LANES)


def scratch_size(R: int, K: int) -> int:
    """Returns the words of scratch that a thread needs."""
    return ROWS + R * rounded_size(K // BLOCK)


@called_jit
def rounded_size(blocks):
    """Returns the words of a rounded row in scratch: whole lines of the cache."""
    pairs = ceil_div(blocks, 2)
    return pairs * PAIR + round_up(2 * pairs, LINE)


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


def _round_block(builder, out, scale_place, values, offset):
    """Writes a rounded block, to its half of the ROUNDED words of two, as the plain twin does."""
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
    half = ir.VectorType(I32, SUMS // 2)
    words = _vector(builder, out, I32, SUMS // 2)
    total = ir.Constant(half, None)
    for byte in range(4):
        up, down = ir.Constant(half, [24 - 8 * byte] * 8), ir.Constant(half, [24] * 8)
        total = builder.add(total, builder.ashr(builder.shl(words, up), down))
    starts = builder.mul(total, ir.Constant(half, [-offset] * 8))
    place = builder.gep(out, [I64(STARTS)])
    builder.store(starts, builder.bitcast(place, half.as_pointer()), align=4)
    builder.store(scale, scale_place, align=4)


@intrinsic
def _round_values(typingctx, w, out, scale, a, index):
    """Rounds BLOCK values of a from a flat index on, for products with blocks like those of w."""

    def codegen(context, builder, sig, args):
        _, out, scale, a, index = args
        values = element_pointer(context, builder, sig.args[3], a, index)
        _round_block(builder, out, scale, values, _offset(w.dtype))
        return context.get_dummy_value()

    return types.void(w, FLOAT_POINTER, FLOAT_POINTER, a, types.int64), codegen


def _integers(builder, kind, blocks):
    """Pointers to two blocks -> SUM_REGISTERS vectors of their integers, plus the offset."""
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


def _scales(builder, _kind, blocks):
    """Pointers to two blocks -> their scales, a vector of two."""
    if not ISA.half:
        first, second = (HOST.load_scale(builder, block) for block in blocks)
        return _shuffle(builder, first, second, [0, LANES])
    first, second = (_vector(builder, block, I16, 1) for block in blocks)
    bits = _shuffle(builder, first, second, [0, 1])
    halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), 2))
    return builder.fpext(halves, ir.VectorType(F32, 2))


def _write_rows(builder, rows, blocks, step, count, add_block):
    """Writes the loop over `blocks` blocks of a row, `step` at a time -> the sums of `rows` rows.

    add_block(number of the block, sums) -> the sums of all rows with its products, `count` vectors
    a row.
    """
    zeros = [HOST.constant(0.0)] * (rows * count)

    def add(block, sums):
        return add_block(block, list(sums))

    _, added = write_loop(builder, HOST, I64(0), blocks, 1, zeros, add, None, step)
    totals = []
    for i in range(rows):
        registers = added[i * count : (i + 1) * count]
        while len(registers) > 1:  # by halves, as lanes
            half = len(registers) // 2
            both = zip(registers[:half], registers[half:], strict=True)
            registers = [builder.fadd(*pair) for pair in both]
        totals.append(HOST.fold(builder, registers[0], builder.fadd))
    return totals


def _write_integer_products(builder, kind, rows, w, blocks, zeros):
    """The products in integers of rounded rows, pointers to them, and blocks -> their sums."""
    pairs = builder.lshr(builder.add(blocks, I64(1)), I64(1))
    scales_start = builder.mul(pairs, I64(PAIR))

    def add_pair(block, sums):
        first = builder.gep(w, [builder.mul(block, I64(SIZES[kind]))])
        HOST.prefetch(builder, builder.gep(first, [I64(PREFETCH_BYTES)]), locality=2)
        is_pair = builder.icmp_signed("<", builder.add(block, I64(1)), blocks)
        second = builder.select(is_pair, builder.gep(first, [I64(SIZES[kind])]), zeros)
        integers, scales = (of(builder, kind, (first, second)) for of in (_integers, _scales))
        for i, row in enumerate(rows):
            pair = builder.gep(row, [builder.mul(block, I64(PAIR // 2))])
            of_row = _vector(builder, builder.gep(row, [builder.add(scales_start, block)]), F32, 2)
            both = builder.fmul(of_row, scales)
            for part, w_q in enumerate(integers):
                start = part * LANES
                q, total = (
                    _vector(builder, builder.gep(pair, [I64(place + start)]), I32, LANES)
                    for place in (INTEGERS, STARTS)
                )
                dots = HOST.dot_bytes(builder, total, w_q, builder.bitcast(q, _BYTES))
                lanes = [lane // (SUMS // 2) for lane in range(start, start + LANES)]
                scale = _shuffle(builder, both, both, lanes)
                term = builder.fmul(builder.sitofp(dots, HOST.vector), scale)
                sums[i * SUM_REGISTERS + part] = builder.fadd(sums[i * SUM_REGISTERS + part], term)
        return sums

    return _write_rows(builder, len(rows), blocks, 2, SUM_REGISTERS, add_pair)


def _write_products(builder, kind, rows, w, blocks):
    """The products of rows of float32, pointers to them, and dequantised blocks -> their sums."""

    def add_block(block, sums):
        place = builder.gep(w, [builder.mul(block, I64(SIZES[kind]))])
        for v in range(0, BLOCK, LANES):
            value = block_values(builder, kind, place, I64(v))
            for i, row in enumerate(rows):
                k = builder.add(builder.mul(block, I64(BLOCK)), I64(v))
                x, number = HOST.load(builder, builder.gep(row, [k])), 2 * i + v // LANES % 2
                sums[number] = HOST.fma(builder, x, value, sums[number])
        return sums

    return _write_rows(builder, len(rows), blocks, 1, 2, add_block)


def _multiply_row(count):
    """-> an intrinsic: writes the products of `count` rows of a and a row of blocks to results.

    rows: the first, `stride` words from the next; w: bytes and the place of the first of `blocks`
    blocks; zeros: a block if rows are rounded, else NULL. One row of blocks at a time, so that the
    CPU sees a single stream to fetch.
    """

    @intrinsic
    def multiply(typingctx, results, rows, stride, w, place, blocks, zeros):
        def codegen(context, builder, sig, args):
            results, first, stride, w, place, blocks, zeros = args
            w = element_pointer(context, builder, sig.args[3], w, place)
            rows = [builder.gep(first, [builder.mul(stride, I64(i))]) for i in range(count)]
            kind, no_zeros = sig.args[3].dtype, ir.Constant(zeros.type, None)
            is_rounded = builder.icmp_unsigned("!=", zeros, no_zeros)
            zeros = builder.bitcast(zeros, w.type)
            with builder.if_else(is_rounded) as branches:
                for branch, write, *others in (
                    (branches[0], _write_integer_products, zeros),
                    (branches[1], _write_products),
                ):
                    with branch:
                        totals = write(builder, kind, rows, w, blocks, *others)
                        for i, total in enumerate(totals):
                            builder.store(total, builder.gep(results, [I64(i)]), align=4)
            return context.get_dummy_value()

        start, number = FLOAT_POINTER, types.int64
        return types.void(start, start, number, w, number, number, start), codegen

    return multiply


_multiply_one, _multiply_four = _multiply_row(1), _multiply_row(4)


@parallel_jit
def multiply_few(out, a, w, bias, addend, by_rows, scratch, workers):
    """Computes out = a w^T [+ bias] [+ addend], of few rows. scratch (workers, scratch_size)."""
    for worker in prange(workers):
        own = at(scratch, np.int64(worker) * scratch.shape[1])
        first, last = row_share(w.shape[0], np.int64(worker), workers)
        if first < last:
            K = a.shape[1]
            rows = Rows(at(a, 0), K)
            if by_rows:
                rows = Rows(at(own, ROWS), rounded_size(K // BLOCK))
                _round_rows(borrow(a), borrow(w), own)
            zeros = at(own, ZEROS) if by_rows else NULL
            operands = borrow(out), rows, borrow(w), borrow(bias), borrow(addend)
            _multiply(*operands, own, zeros, first, last)


@jit
def _round_rows(a, w, own):
    """Writes scratch: zeros, and the rounded rows of a."""
    for k in range(ROWS):
        own[k] = np.float32(0)
    R, K = a.shape
    blocks = K // BLOCK
    for i in range(R):
        row = at(own, ROWS + i * rounded_size(blocks))
        scales = at(row, ceil_div(blocks, 2) * PAIR)
        for n in range(blocks):
            half = at(row, n // 2 * PAIR + n % 2 * (SUMS // 2))
            _round_values(w, half, at(scales, n), a, i * K + n * BLOCK)
        if blocks % 2 == 1:
            half = at(row, blocks // 2 * PAIR + SUMS // 2)
            for lane in range(SUMS // 2):
                half[INTEGERS + lane] = half[STARTS + lane] = np.float32(0)
            scales[blocks] = np.float32(0)


@jit
def _multiply(out, rows, w, bias, addend, own, zeros, first, last):
    """Columns first..last of the product, one at a time.

    rows: of the left operand, rounded if zeros is not NULL; own: scratch.
    """
    R, size = out.shape[0], w.shape[1]
    blocks, results = size // block_bytes(w), at(own, RESULTS)
    for j in range(first, last):
        i = 0
        while i < R:
            start, count = at(rows.start, i * rows.stride), 4 if R - i >= 4 else 1
            if count == 4:
                _multiply_four(results, start, rows.stride, w, j * size, blocks, zeros)
            else:
                _multiply_one(results, start, rows.stride, w, j * size, blocks, zeros)
            for n in range(count):
                total = results[n]
                if bias.size > 0:
                    total += bias[j]
                if addend.size > 0:
                    total += addend[i + n, j]
                out[i + n, j] = total
            i += count
