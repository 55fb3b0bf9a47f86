"""Blocks of small integers (`kernels.codecs`) in memory, as vectors of float32.

Kernels get their bytes as arrays of two dimensions, whose number type is that of the integers and
says which blocks they are: int8 those of q8_0, uint8 those of q4_0.
"""

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic, overload

from smallmind.kernels.codegen.operation import element_pointer
from smallmind.kernels.codegen.simd import HOST, LANES, at, load_up_to, vector
from smallmind.kernels.codegen.transpose import store_transposed
from smallmind.kernels.codegen.vector_ir import I64
from smallmind.kernels.number_types import BLOCK, DTYPES, GROUP, HALF
from smallmind.parts import QUANTISED

SCALE = 2  # bytes of a block's scale, before its integers
_TYPES = [DTYPES[kind.name] for kind in QUANTISED.values()]
BYTES = {dtype: dtype["q"].base for dtype in _TYPES}
SIZES = {from_dtype(BYTES[dtype]): dtype.itemsize for dtype in _TYPES}


def bytes_of(blocks: np.ndarray) -> np.ndarray:
    """blocks (N, n) -> the same memory as kernels take it (N, bytes)."""
    return blocks.view(BYTES[blocks.dtype])


def _copies(bits):
    """-> an intrinsic: copies an integer of so many bits from a pointer to another."""

    @intrinsic
    def copy(typingctx, target, source):
        def codegen(context, builder, sig, args):
            kind = ir.IntType(bits).as_pointer()
            target, source = (builder.bitcast(x, kind) for x in args)
            builder.store(builder.load(source, align=1), target, align=1)
            return context.get_dummy_value()

        return types.void(target, source), codegen

    return copy


copy_scale, copy_word = _copies(8 * SCALE), _copies(32)


@intrinsic
def bytes_from(typingctx, array, words):
    """array, a pointer to float32 -> the same pointer, to what the array consists of."""
    kind = types.CPointer(array.dtype)

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[1], context.get_value_type(kind))

    return kind(array, words), codegen


def move_row(row, array, number):
    """Copies a row out of a group of rows of blocks (`number_types.in_groups`). row: a pointer."""


@overload(move_row)
def _move_row(row, array, number):
    if array.dtype not in SIZES:
        return lambda row, array, number: None  # noqa: ARG005
    size = SIZES[array.dtype]
    words = (size - SCALE) // 4

    def move(row, array, number):
        blocks, lane = array.shape[1] // size, number % GROUP
        group = (number - lane) * array.shape[1]
        integers = group + blocks * SCALE * GROUP
        for n in range(blocks):
            copy_scale(at(row, n * size), at(array, group + (n * GROUP + lane) * SCALE))
            for k in range(words):
                word = integers + 4 * ((n * words + k) * GROUP + lane)
                copy_word(at(row, n * size + SCALE + 4 * k), at(array, word))

    return move


@intrinsic
def is_quantised(typingctx, array):
    """Returns true, as a constant, if an array is of bytes of blocks."""
    found = ir.Constant(ir.IntType(1), int(array.dtype in SIZES))
    return types.boolean(array), lambda _context, _builder, _sig, _args: found


@intrinsic
def block_bytes(typingctx, array):
    """Returns the bytes of a block, as a constant."""
    size = I64(SIZES[array.dtype])
    return types.int64(array), lambda _context, _builder, _sig, _args: size


def block_values(builder, kind, block, place):
    """-> the elements of a block from `place` on, a multiple of LANES, as written for this type."""
    scale = HOST.load_scale(builder, block)
    integers = builder.gep(block, [I64(SCALE)])
    if kind == types.int8:
        values = HOST.load_signed(builder, builder.gep(integers, [place]))
    else:
        is_high = builder.icmp_signed(">=", place, I64(HALF))
        shift = builder.select(is_high, ir.IntType(32)(4), ir.IntType(32)(0))
        place = builder.and_(place, I64(HALF - 1))
        values = HOST.load_nibbles(builder, builder.gep(integers, [place]), shift)
    return builder.fmul(scale, values)


@intrinsic
def load_values(typingctx, array, index):
    """array, flat index of a value, a multiple of LANES -> the LANES values from there."""

    def codegen(context, builder, sig, args):
        data, index = args
        number = builder.lshr(index, I64(BLOCK.bit_length() - 1))
        start = builder.mul(number, I64(SIZES[array.dtype]))
        block = element_pointer(context, builder, sig.args[0], data, start)
        return block_values(builder, array.dtype, block, builder.and_(index, I64(BLOCK - 1)))

    return vector(array, types.int64), codegen


def load_stored(array, index, count):
    """Loads numbers by `load_up_to`, blocks, whose rows are whole vectors, by `load_values`."""


@overload(load_stored, jit_options={"forceinline": True})
def _load_stored(array, index, count):
    if array.dtype in SIZES:
        return lambda array, index, count: load_values(array, index)  # noqa: ARG005
    return lambda array, index, count: load_up_to(array, index, count)  # noqa: PLW0108


@intrinsic
def transpose_blocks(typingctx, array, place, row, last, target, target_stride):
    """Writes the transpose of LANES x BLOCK values: target[k, i] = row i, value k.

    place: of the block in the first row, in bytes; row: bytes between rows. Rows after the last one
    repeat it, as what is beyond it is not read. The stride counts elements.
    """

    def codegen(context, builder, sig, args):
        data, place, row, last, target, stride = args
        blocks = []
        for i in range(LANES):
            number = builder.select(builder.icmp_signed("<", I64(i), last), I64(i), last)
            start = builder.add(place, builder.mul(number, row))
            blocks.append(element_pointer(context, builder, sig.args[0], data, start))
        for k in range(0, BLOCK, LANES):
            rows = [block_values(builder, array.dtype, block, I64(k)) for block in blocks]
            column = builder.gep(target, [builder.mul(stride, I64(k))])
            store_transposed(builder, rows, column, stride)
        return context.get_dummy_value()

    numbers = [types.int64] * 3
    return types.void(array, *numbers, target, types.int64), codegen
