"""Products a b^T in which each row is summed by itself: its bits do not depend on other rows.

Steps of decoding have one row or many, and products of any variant with few rows are as fast this
way. Each element of the result is a sum along K in the lanes of one register, which are added in a
fixed order at the end. A block of rows by OUTPUTS rows of b is summed at a time: what limits is
reading b, once. These rows are as far apart as can be, so that each is followed by the next one of
its stream: the CPU fetches far ahead in few long streams, but not beyond the ends of short rows.
"""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import jit, parallel_jit, serial_jit
from smallmind.kernels.codegen.operation import STORAGE, element_pointer
from smallmind.kernels.codegen.rounding import ceil_div
from smallmind.kernels.codegen.simd import HOST, at, borrow, share
from smallmind.kernels.codegen.vector_ir import F32, I16, I32, I64, Storage
from smallmind.kernels.gemm.blocked import finish, operands_of
from smallmind.kernels.gemm.packing import TRANSPOSE_B, Region
from smallmind.kernels.gemm.tile import Rows, write_loop

LANES = ISA.lanes
OUTPUTS = 4
# Bytes from which on a matrix is not expected in a core's second-level cache, and from what is
# multiplied to what is then prefetched into it.
MIN_PREFETCHED_BYTES, PREFETCH_BYTES = 2**18, 2048
# Elements of K summed one after the other: the sums of blocks are added, so that the error does not
# grow with all of K.
BLOCK_DEPTH = 8192
MAX_SUMS = 8192  # elements of the result that are finished while they are in the first-level cache
# Rows whose sums, and what is multiplied, are in registers: of 32, and of 16.
MAX_ROWS = 6 if ISA.tile_vectors == 4 else 3


def scratch_size(M: int) -> int:
    """Returns the float32 of scratch that a thread needs for M rows."""
    return max(MAX_SUMS, OUTPUTS * M)


def _loaded(builder, pointer, storage, count=None):
    """Loads numbers as they are multiplied: LANES, or pairs of bfloat16; or the first `count`."""
    if storage is not Storage.BFLOAT16:
        if count is None:
            return HOST.load(builder, pointer, storage)
        return HOST.load_first(builder, pointer, count, storage)
    kind = ir.VectorType(I16, 2 * LANES)
    place = builder.bitcast(pointer, kind.as_pointer())
    if count is None:
        return builder.bitcast(builder.load(place, align=2), HOST.vector)
    lane = ir.Constant(kind, list(range(2 * LANES)))
    first = builder.trunc(count, I16)
    ones = ir.Constant(ir.VectorType(I32, 2 * LANES), [0] * (2 * LANES))
    count = builder.insert_element(ir.Constant(kind, ir.Undefined), first, I32(0))
    mask = builder.icmp_signed("<", lane, builder.shuffle_vector(count, count, ones))
    name = f"llvm.masked.load.v{2 * LANES}i16.p0"
    arguments = place, I32(2), mask, ir.Constant(kind, None)
    return builder.bitcast(HOST.call(builder, name, kind, *arguments), HOST.vector)


def _lane_sums(builder, sums):
    """Vectors, 4 or 1 -> the sums of their lanes, in one vector or a number, added as by `fold`.

    First two vectors become one each time, with a part for each sum, whose halves are then added.
    """
    if len(sums) == 1:
        return HOST.fold(builder, sums[0], builder.fadd)
    size = LANES  # of a part
    while size > 1:
        pairs = list(zip(sums[::2], sums[1::2], strict=True)) if len(sums) > 1 else [2 * sums]
        parts = range(0, LANES * min(len(sums), 2) if len(sums) > 1 else OUTPUTS * size, size)
        folded = []
        for pair in pairs:
            halves = (
                [part + half + lane for part in parts for lane in range(size // 2)]
                for half in (0, size // 2)
            )
            masks = (ir.Constant(ir.VectorType(I32, len(half)), half) for half in halves)
            folded.append(builder.fadd(*(builder.shuffle_vector(*pair, mask) for mask in masks)))
        sums, size = folded, size // 2
    return sums[0]


def _write_block(builder, storage, shape, sums, a, b, extent, fetches):
    """Writes sums[i, j] = a[i] . b[j], for a shape of rows of a and of b.

    a and b: pointers to the first rows; sums: pointer, and elements from a row to the next; extent:
    elements from a row of a or b to the next, how many of them are multiplied, rows from one of b
    to the next, and if the products are added to what the sums are.
    """
    (rows, outputs), (K, depth, apart, adds) = shape, extent
    left = [builder.gep(a, [builder.mul(K, I64(i))]) for i in range(rows)]
    between = builder.mul(K, apart)
    right = [builder.gep(b, [builder.mul(between, I64(j))]) for j in range(outputs)]
    ahead = I64(PREFETCH_BYTES // (4 if storage is Storage.FLOAT32 else 2))
    has_pairs = storage is Storage.BFLOAT16
    step = 2 * LANES if has_pairs else LANES
    multiply_add = HOST.dot_pairs if has_pairs else HOST.add_product

    def add(k, before, count=None):
        if count is None:
            with builder.if_then(fetches):
                for row in right:
                    HOST.prefetch(builder, builder.gep(row, [builder.add(k, ahead)]), locality=2)
        x = [_loaded(builder, builder.gep(row, [k]), storage, count) for row in left]
        added = list(before)
        for j, row in enumerate(right):
            y = _loaded(builder, builder.gep(row, [k]), storage, count)
            for i in range(rows):
                place = i * outputs + j
                added[place] = multiply_add(builder, added[place], x[i], y)
        return added

    zeros = [HOST.constant(0.0)] * (rows * outputs)
    tail = builder.and_(depth, I64(step - 1))
    whole = builder.sub(depth, tail)
    _, found = write_loop(builder, HOST, I64(0), whole, 1, zeros, add, None, step)
    done = builder.block
    with builder.if_then(builder.icmp_signed(">", tail, I64(0))):
        with_tail, end = add(whole, found, tail), builder.block
    totals = [builder.phi(HOST.vector) for _ in zeros]
    for total, before, after in zip(totals, found, with_tail, strict=True):
        total.add_incoming(before, done)
        total.add_incoming(after, end)
    start, stride = sums
    for i in range(rows):
        total = _lane_sums(builder, totals[i * outputs : (i + 1) * outputs])
        place = builder.gep(start, [builder.mul(stride, I64(i))])
        for j in range(outputs):
            own = builder.gep(place, [builder.mul(apart, I64(j))])
            before = builder.select(adds, builder.load(own), F32(0.0))
            found = builder.extract_element(total, I32(j)) if outputs > 1 else total
            builder.store(builder.fadd(found, before), own)


def _block_of(outputs, most):
    """-> an intrinsic: sums[i, j] = a[i] . b[j], for `rows` rows of a, 1 to most, and outputs of b.

    sums: Rows; i and j: the first rows, those of b `apart`. Products of `depth` elements from
    number `start` on, which are added to the sums unless it is 0.
    """

    @intrinsic
    def multiply(typingctx, sums, a, b, i, j, apart, rows, start, depth, fetches):
        def codegen(context, builder, sig, args):
            sums, a, b, i, j, apart, rows, start, depth, fetches = args
            shape = context.make_array(sig.args[1])(context, builder, a).shape
            K = builder.extract_value(shape, 1)

            def place(array, number, row):
                index = builder.add(builder.mul(row, K), start)
                return element_pointer(context, builder, sig.args[number], array, index)

            a, b, sums = place(a, 1, i), place(b, 2, j), cgutils.unpack_tuple(builder, sums)
            extent = K, depth, apart, builder.icmp_signed(">", start, I64(0))
            storage, end = STORAGE[sig.args[1].dtype], builder.append_basic_block("multiplied")
            switch = builder.switch(rows, end)
            for count in range(1, most + 1):
                block = builder.append_basic_block("rows")
                switch.add_case(I64(count), block)
                builder.position_at_end(block)
                _write_block(builder, storage, (count, outputs), sums, a, b, extent, fetches)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(sums, a, b, *[types.int64] * 6, types.boolean), codegen

    return multiply


_multiply_fours, _multiply_one = _block_of(OUTPUTS, MAX_ROWS), _block_of(1, 1)


@jit
def _multiply(operands, sums, left, right):
    """Columns left..right of the result, some at a time. sums: scratch."""
    a, b = operands.a, operands.b
    M, K = a.shape
    if M == 0:
        return
    size = ceil_div(M, ceil_div(M, MAX_ROWS))  # rows at a time
    width = max(OUTPUTS, MAX_SUMS // M // OUTPUTS * OUTPUTS)
    fetches = b.size * b.itemsize > MIN_PREFETCHED_BYTES
    for column in range(left, right, width):
        last = min(right, column + width)
        apart = (last - column) // OUTPUTS
        fours = column + OUTPUTS * apart
        for start in range(0, max(K, 1), BLOCK_DEPTH):
            depth = min(BLOCK_DEPTH, K - start)
            for j in range(column, column + apart):
                for i in range(0, M, size):
                    place = Rows(at(sums, i * width + j - column), width)
                    rows = min(size, M - i)
                    _multiply_fours(place, a, b, i, j, apart, rows, start, depth, fetches)
            for j in range(fours, last):
                for i in range(M):
                    place = Rows(at(sums, i * width + j - column), width)
                    _multiply_one(place, a, b, i, j, 1, 1, start, depth, False)
        finish(operands, sums, 0, width, Region(0, M, column, last))


@serial_jit
def multiply_alone(out, activation, a, b, bias, addend, scratch):
    """Computes out = a b^T [+ bias] [+ addend], activation = gelu(out), on the calling thread."""
    operands = operands_of(out, activation, a, b, bias, addend, TRANSPOSE_B)
    _multiply(operands, borrow(scratch[0]), 0, out.shape[1])


@parallel_jit
def multiply_parallel(out, activation, a, b, bias, addend, scratch):
    """Computes as `multiply_alone` does, on all threads, with a row of scratch each."""
    workers = scratch.shape[0]
    for worker in prange(workers):
        operands = operands_of(out, activation, a, b, bias, addend, TRANSPOSE_B)
        left, right = share(out.shape[1], np.int64(worker), workers)
        if left < right:
            _multiply(operands, borrow(scratch[worker]), left, right)
