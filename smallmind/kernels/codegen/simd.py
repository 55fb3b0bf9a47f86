"""Vectors of float32, written as LLVM IR and used from Numba like numbers.

A `Vector` holds LANES float32, as many as one register of this CPU. Inside a kernel it can be
loaded, stored, added and multiplied; LLVM keeps it in a register. Arrays may be float32, or the
bits of float16 or bfloat16 (`number_types`), which are converted as they are loaded and stored.

Wherever a function here takes an array, it takes a pointer as well. Inside a kernel pointers are
cheaper: whenever an array is passed, sliced or taken from a tuple, its references are counted.
"""

import dataclasses
import inspect
import operator
from typing import ClassVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, imputils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import inline_jit, jit
from smallmind.kernels.codegen.operation import PLACE, element_pointer, operation
from smallmind.kernels.codegen.rounding import ceil_div
from smallmind.kernels.codegen.vector_ir import I32, I64, VectorIR

LANES = ISA.lanes
LINE_SIZE = 64  # bytes of a cache line
LOG2_E = np.float32(np.log2(np.e))
HOST = VectorIR(ISA)
NARROW = min(LANES, 8)  # elements of shorter vectors, which cross fewer cache lines
_NARROW = VectorIR(dataclasses.replace(ISA, lanes=NARROW))


class VectorType(types.Type):
    """Numba's type of a Vector."""

    def __init__(self):
        super().__init__(name=f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, HOST.vector)


class DoublesType(types.Type):
    """Numba's type of LANES float64: only for sums of what float32 cannot hold."""

    def __init__(self):
        super().__init__(name=f"float64x{LANES}")


doubles = DoublesType()
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


@register_model(DoublesType)
class DoublesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _DOUBLES)


@intrinsic
def at(typingctx, array, index):
    """array, flat index -> pointer to that element."""

    def codegen(context, builder, sig, args):
        return element_pointer(context, builder, sig.args[0], *args)

    return types.CPointer(array.dtype)(array, types.int64), codegen


@intrinsic
def start_of_overlapping(typingctx, array):
    """-> the pointer to the first element of an array that another operand may be, or overlap.

    Numba tells LLVM that the arrays of a prange loop do not overlap, and LLVM may then move a load
    from one past a store to another. It knows nothing about what comes out of inline assembly.
    """

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], I64(0))
        kind = ir.FunctionType(pointer.type, [pointer.type])
        return builder.asm(kind, "", "=r,0", [pointer], side_effect=False)

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def borrow(typingctx, array):
    """Returns the array without reference counting, which would slow down small kernels.

    Only for arrays that outlive the call, such as those that Python passes in.
    """

    def codegen(context, builder, sig, args):
        borrowed = context.make_array(array)(context, builder, value=args[0])
        borrowed.meminfo = ir.Constant(borrowed.meminfo.type, None)
        borrowed.parent = ir.Constant(borrowed.parent.type, None)
        return borrowed._getvalue()

    return array(array), codegen


@intrinsic
def line_elements(typingctx, pointer):
    """Returns the number of elements in a cache line."""

    def codegen(context, builder, sig, args):
        return I64(8 * LINE_SIZE // pointer.dtype.bitwidth)

    return types.int64(pointer), codegen


@intrinsic
def parts(typingctx, scratch, sizes):
    """A pointer, a named tuple of sizes -> the same tuple of pointers to parts of these sizes."""
    kind = types.BaseTuple.from_types([scratch] * len(sizes), sizes.instance_class)

    def codegen(context, builder, sig, args):
        pointers = [args[0]]
        for size in cgutils.unpack_tuple(builder, args[1])[:-1]:
            pointers.append(builder.gep(pointers[-1], [size]))
        return context.make_tuple(builder, kind, pointers)

    return kind(scratch, sizes), codegen


@operation(vector, PLACE)
def load(builder, place):
    """array, flat index -> the LANES elements from there."""
    return HOST.load(builder, *place)


@operation(types.float32, PLACE)
def element(builder, place):
    """array, flat index -> the element there, as float32."""
    one = HOST.load_first(builder, place.pointer, I64(1), place.storage)
    return builder.extract_element(one, I32(0))


@operation(vector, PLACE, types.int64)
def load_first(builder, place, count):
    """array, flat index, count -> the first `count` elements from there, then zeros."""
    return HOST.load_first(builder, place.pointer, count, place.storage)


@operation(types.void, PLACE, vector)
def store(builder, place, value):
    """Writes LANES elements of array from a flat index."""
    HOST.store(builder, value, *place)


@operation(types.void, PLACE, vector, types.int64)
def store_first(builder, place, value, count):
    """Writes the first `count` lanes of value to array from a flat index."""
    HOST.store_first(builder, value, place.pointer, count, place.storage)


@operation(types.void, PLACE, PLACE)
def copy_narrow(builder, target, source):
    """Copies NARROW elements from one place to another: `load` and `store` of fewer lanes."""
    _NARROW.store(builder, _NARROW.load(builder, *source), *target)


@operation(types.void, PLACE)
def prefetch(builder, place):
    """Prefetches the cache line of array at a flat index, which may be out of bounds."""
    HOST.prefetch(builder, place.pointer)


@operation(types.void, PLACE)
def prefetch_to_write(builder, place):
    """Prefetches and takes the line away from other cores, to which it may belong."""
    HOST.prefetch(builder, place.pointer, write=True)


@operation(vector, types.float32)
def broadcast(builder, scalar):
    """float32 -> Vector with that value in every lane."""
    return HOST.splat(builder, scalar)


def on_vectors(write):
    """-> the intrinsic of an operation, as in `VectorIR`, whose arguments and result are
    Vectors.
    """
    arguments = len(inspect.signature(write).parameters) - 1  # besides the builder
    return operation(vector, *[vector] * arguments)(write)


fma = on_vectors(HOST.fma)
dot_pairs = on_vectors(HOST.dot_pairs)
scale_by_power = on_vectors(HOST.scale_by_power)
scale_by_normal_power = on_vectors(HOST.scale_by_normal_power)
reciprocal = on_vectors(HOST.reciprocal)
fraction = on_vectors(HOST.fraction)
scale_by_floor = on_vectors(HOST.scale_by_floor)
clamp_to_normal = on_vectors(HOST.clamp_to_normal)
normal_fraction = on_vectors(HOST.normal_fraction)
scale_by_normal_floor = on_vectors(HOST.scale_by_normal_floor)
_estimate_log2 = on_vectors(HOST.estimate_log2)
nearest = on_vectors(HOST.nearest)
square_root = on_vectors(HOST.square_root)


@on_vectors
def maximum(builder, a, b):
    """Returns the larger of each pair of lanes; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@on_vectors
def minimum(builder, a, b):
    """Returns the smaller of each pair of lanes; b where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@on_vectors
def zero_below(builder, value, x, limit):
    """Keeps value in the lanes where x is not below limit; zero in the others."""
    return builder.select(builder.fcmp_ordered("<", x, limit), HOST.constant(0.0), value)


@operation(vector, vector, types.int64)
def keep_first(builder, value, count):
    """Keeps the first `count` lanes of value; zero in the others."""
    return builder.select(HOST.first_lanes(builder, count), value, HOST.constant(0.0))


@operation(vector, vector, types.int64, vector)
def first_or(builder, value, count, otherwise):
    """Keeps the first `count` lanes of value; `otherwise` in the others."""
    return builder.select(HOST.first_lanes(builder, count), value, otherwise)


@operation(types.float32, vector)
def lane_sum(builder, a):
    """Returns the sum of all lanes, added pairwise in a fixed order."""
    return HOST.fold(builder, a, builder.fadd)


@operation(types.float32, vector)
def lane_maximum(builder, a):
    """Returns the largest lane."""

    def larger(a, b):
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return HOST.fold(builder, a, larger)


@operation(doubles)
def no_doubles(builder):
    """-> LANES zeros in float64."""
    return ir.Constant(_DOUBLES, None)


@operation(doubles, doubles, vector)
def add_squares(builder, total, a):
    """-> total + a * a in every lane, in float64, where the square of a float32 is exact."""
    wide = builder.fpext(a, _DOUBLES)
    return builder.fadd(total, builder.fmul(wide, wide))


@operation(types.float64, doubles, doubles)
def sum_of_doubles(builder, a, b):
    """Returns the sum of all lanes of both, added pairwise in a fixed order."""
    return HOST.fold(builder, builder.fadd(a, b), builder.fadd)


def _define_operator(function, instruction):
    """Lets Numba code write `a + b` with Vectors, or with a Vector and a float32."""

    class Template(ConcreteTemplate):
        cases: ClassVar = [
            signature(vector, vector, vector),
            signature(vector, vector, types.float32),
            signature(vector, types.float32, vector),
        ]

    infer_global(function)(Template)

    def codegen(context, builder, sig, args):
        widened = [
            argument if kind == vector else HOST.splat(builder, argument)
            for argument, kind in zip(args, sig.args, strict=True)
        ]
        return getattr(builder, instruction)(*widened)

    for case in Template.cases:
        imputils.lower_builtin(function, *case.args)(codegen)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_function, _instruction)


_DROPOUT = types.uint64, types.int64, types.int64, types.int64, types.float32


@operation(vector, *_DROPOUT)
def dropout_factors(builder, key, index, step, threshold, scale):
    """Returns the scale in the lanes that dropout keeps, zero in those that it drops.

    The lanes are at the flat positions index, index + step, ... The one at position i is kept if
    the 32-bit hash of (key, i) is at least threshold: see `reference.dropout_mask`.
    """
    low, high = builder.trunc(key, I32), builder.trunc(builder.lshr(key, I64(32)), I32)

    def mix(x, shift):
        return builder.xor(x, builder.lshr(x, HOST.integer(shift)))

    lane = ir.Constant(HOST.integers, list(range(LANES)))
    lane = builder.mul(lane, HOST.splat(builder, builder.trunc(step, I32)))
    x = builder.add(HOST.splat(builder, builder.trunc(index, I32)), lane)
    x = builder.mul(builder.xor(x, HOST.splat(builder, low)), HOST.integer(0xED5AD4BB))
    x = builder.add(mix(x, 15), HOST.splat(builder, high))
    x = mix(builder.mul(x, HOST.integer(0xAC4C1B51)), 14)
    x = builder.mul(x, HOST.integer(0x31848BAB))
    kept = builder.icmp_unsigned(">=", x, HOST.splat(builder, builder.trunc(threshold, I32)))
    return builder.select(kept, HOST.splat(builder, scale), HOST.constant(0.0))


@jit
def exp(x):
    """-> e**x in every lane, within 2e-7 relative; 0 below -103.3, infinity above 88.7, or NaN.

    e**x = 2**n e**r with |r| <= ln(2)/2, e**r by a polynomial of degree 6 (Cephes, expf).
    """
    x = minimum(broadcast(np.float32(89.0)), maximum(broadcast(np.float32(-104.0)), x))
    p, n = _exp_parts(x)
    return scale_by_power(p, n)


@jit
def _exp_parts(x):
    """-> p, n with e**x = p 2**n."""
    n = nearest(x * np.float32(1.4426950408889634))
    r = fma(n, broadcast(np.float32(-0.693359375)), x)
    r = fma(n, broadcast(np.float32(2.12194440e-4)), r)
    p = broadcast(np.float32(1.9875691500e-4))
    p = fma(p, r, broadcast(np.float32(1.3981999507e-3)))
    p = fma(p, r, broadcast(np.float32(8.3334519073e-3)))
    p = fma(p, r, broadcast(np.float32(4.1665795894e-2)))
    p = fma(p, r, broadcast(np.float32(1.6666665459e-1)))
    p = fma(p, r, broadcast(np.float32(5.0000001201e-1)))
    return fma(p * r, r, r) + np.float32(1.0), n


@inline_jit
def exp2(x):
    """-> 2**x in every lane, within 2e-7 relative; 0 below -150, infinity from 128 on, NaN for NaN.

    2**x = 2**floor(x) 2**r with 0 <= r <= 1, 2**r by a polynomial that is exact at 0.
    """
    return scale_by_floor(_exp2_of_fraction(fraction(x)), x)


@inline_jit
def exp2_normal(x):
    """-> `exp2` for x up to 127, but where that is faster 2**-126 for all x below -126.

    Half the instructions on CPUs that do not scale by powers of two in one.
    """
    x = clamp_to_normal(x)
    return scale_by_normal_floor(_exp2_of_fraction(normal_fraction(x)), x)


@inline_jit
def _exp2_of_fraction(r):
    p = broadcast(np.float32(1.8671300706e-3))
    p = fma(p, r, broadcast(np.float32(9.0170303205e-3)))
    p = fma(p, r, broadcast(np.float32(5.5799913106e-2)))
    p = fma(p, r, broadcast(np.float32(2.4016445015e-1)))
    p = fma(p, r, broadcast(np.float32(6.9315131180e-1)))
    return fma(p, r, broadcast(np.float32(1.0)))


@jit
def log2(x):
    """Returns the logarithm to base 2 of every lane, a normal positive number; within 6e-7.

    Infinity and NaN stay what they are.
    """
    y = _estimate_log2(x)
    for _ in range(2):
        # Near 1 log2(z) is about 2 (z - 1) / (z + 1) log2(e): the error becomes its cube / 12.
        z = x * exp2(np.float32(0) - y)
        y = y + (z - np.float32(1)) / (z + np.float32(1)) * np.float32(2.885390081777927)
    return y


@jit
def sigmoid(x):
    """-> 1 / (1 + e**-x) in every lane, within 2e-7 relative; 0 below -88.7, NaN for NaN."""
    # Where neither e**-x nor 1 + e**-x leaves the normal numbers, which is faster.
    low, high = broadcast(np.float32(-88.3)), broadcast(np.float32(87.0))
    p, n = _exp_parts(np.float32(0) - minimum(high, maximum(low, x)))
    s = np.float32(1) / (scale_by_normal_power(p, n) + np.float32(1))
    return zero_below(s, x, broadcast(np.float32(-88.72)))


@jit
def sigmoid_base2(y):
    """-> 1 / (1 + 2**-y) in every lane, within 3e-7 relative; 0 below -125, NaN for NaN.

    Half the instructions of `sigmoid`, for arguments that were multiplied by log2(e) before: their
    rounding is the larger error, of 6e-8 |y|. 2**-y = 2**n 2**r with |r| <= 1/2, 2**r by a minimax
    polynomial of degree 6: a third faster on AVX2 than `exp2`, which may be denormal.
    """
    low, high = broadcast(np.float32(-125.0)), broadcast(np.float32(125.0))
    x = np.float32(0) - minimum(high, maximum(low, y))
    n = nearest(x)
    r = x - n
    p = broadcast(np.float32(1.534581242594868e-4))
    p = fma(p, r, broadcast(np.float32(1.3399930903688073e-3)))
    p = fma(p, r, broadcast(np.float32(9.618489071726799e-3)))
    p = fma(p, r, broadcast(np.float32(5.550328642129898e-2)))
    p = fma(p, r, broadcast(np.float32(2.4022646248340607e-1)))
    p = fma(p, r, broadcast(np.float32(6.931471824645996e-1)))
    p = fma(p, r, broadcast(np.float32(1.0)))
    return zero_below(reciprocal(scale_by_normal_power(p, n) + np.float32(1)), y, low)


@inline_jit
def load_up_to(x, index, count):
    """array, flat index -> the first `count` elements from there, then zeros.

    For the body of a loop over whole vectors, where `count` is the constant LANES, which is also
    called for the partial vector after them. A variable count would cost the loop a branch.
    """
    if count == LANES:
        return load(x, index)
    return load_first(x, index, count)


@inline_jit
def store_up_to(x, index, value, count):
    """Writes the first `count` lanes of value to array from a flat index. See `load_up_to`."""
    if count == LANES:
        store(x, index, value)
    else:
        store_first(x, index, value, count)


@jit
def share(size, worker, workers):
    """-> the elements first..last of `size` that a worker owns: whole vectors, except the last."""
    vectors = ceil_div(size, LANES)
    first = vectors * worker // workers * LANES
    return first, min(size, vectors * (worker + 1) // workers * LANES)
