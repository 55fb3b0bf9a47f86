"""Vectors of float32, written as LLVM IR and used from Numba like numbers.

A `Vector` holds LANES float32, as many as one register of this CPU. Inside a kernel it can be
loaded, stored, added, multiplied and compared; LLVM keeps it in a register. `multiply_tile` is the
micro-kernel of every matrix product: it holds a tile of the result in registers and walks along K.
"""

import operator
from dataclasses import dataclass
from typing import ClassVar

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, imputils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from smallmind.kernels.compilation import jit, native

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


@dataclass(frozen=True)
class InstructionSet:
    """The register tile that suits a CPU: TILE_ROWS x (TILE_VECTORS * lanes) accumulators."""

    name: str
    lanes: int
    tile_rows: int
    tile_vectors: int


def instruction_set(architecture: str, features: dict[str, bool]) -> InstructionSet:
    """CPU architecture and LLVM feature flags -> the tile that fills its registers, none spilt.

    AVX-512 has 32 registers: 6 x 4 accumulators, 4 of B, 1 of A. AVX2 has 16: 6 x 2, 2, 1.
    NEON has 32 of 4 lanes: 6 x 4, 4, 1. Plain x86-64 has 16 of 4 lanes: 6 x 2, 2, 1.
    """
    if features.get("avx512f"):
        return InstructionSet("AVX-512", lanes=16, tile_rows=6, tile_vectors=4)
    if features.get("avx2") and features.get("fma"):
        return InstructionSet("AVX2", lanes=8, tile_rows=6, tile_vectors=2)
    if architecture.startswith(("aarch64", "arm64")):
        return InstructionSet("NEON", lanes=4, tile_rows=6, tile_vectors=4)
    return InstructionSet(architecture, lanes=4, tile_rows=6, tile_vectors=2)


def _compiled_features() -> dict[str, bool]:
    """What Numba will compile for: the host's features unless NUMBA_CPU_NAME names another CPU."""
    from numba.core import config

    if config.CPU_NAME is None or config.CPU_NAME == "host":
        return dict(llvm.get_host_cpu_features())
    if config.CPU_FEATURES:
        return {word[1:]: word[0] == "+" for word in config.CPU_FEATURES.split(",") if word}
    # LLVM knows the features of a named CPU, but llvmlite does not hand them out.
    avx512 = ("skylake-avx512", "icelake", "sapphirerapids", "znver4", "znver5", "cascadelake")
    avx2 = ("haswell", "broadwell", "skylake", "alderlake", "znver1", "znver2", "znver3")
    name = config.CPU_NAME
    return {
        "avx512f": name.startswith(avx512),
        "avx2": name.startswith(avx2),
        "fma": name.startswith(avx2),
    }


ISA = instruction_set(llvm.get_process_triple().split("-")[0], _compiled_features())
LANES = ISA.lanes
TILE_ROWS = ISA.tile_rows
TILE_VECTORS = ISA.tile_vectors
PANEL = LANES * TILE_VECTORS  # columns of a tile at its widest

VECTOR = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(I32, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)


class VectorType(types.Type):
    """Numba's type of a Vector."""

    def __init__(self):
        super().__init__(name=f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, VECTOR)


# ---------------------------------------------------------------- IR of single operations


def _splat(builder, scalar):
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTEGERS, [0] * LANES))


def _constant(value):
    return ir.Constant(VECTOR, [value] * LANES)


def _load(builder, pointer):
    return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)


def _store(builder, value, pointer):
    builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)


def _call(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _fma(builder, a, b, c):
    return _call(builder, f"llvm.fma.v{LANES}f32", VECTOR, a, b, c)


def _first_lanes(builder, count):
    """count (i64) -> mask of the lanes below it."""
    lane = ir.Constant(INTEGERS, list(range(LANES)))
    return builder.icmp_signed("<", lane, _splat(builder, builder.trunc(count, I32)))


def _load_first(builder, pointer, count):
    place = builder.bitcast(pointer, VECTOR.as_pointer())
    name = f"llvm.masked.load.v{LANES}f32.p0"
    mask = _first_lanes(builder, count)
    kind = ir.FunctionType(VECTOR, [place.type, I32, MASK, VECTOR])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [place, I32(4), mask, _constant(0.0)])


def _store_first(builder, value, pointer, count):
    place = builder.bitcast(pointer, VECTOR.as_pointer())
    name = f"llvm.masked.store.v{LANES}f32.p0"
    mask = _first_lanes(builder, count)
    kind = ir.FunctionType(ir.VoidType(), [VECTOR, place.type, I32, MASK])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(function, [value, place, I32(4), mask])


def _element(context, builder, array_type, array, index):
    """Pointer to the element at a flat index of a contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, value=array).data, [index])


# ---------------------------------------------------------------- what kernels call


@intrinsic
def at(typingctx, array, index):
    """array, flat index -> pointer to that element."""

    def codegen(context, builder, sig, args):
        return _element(context, builder, sig.args[0], args[0], args[1])

    return types.CPointer(array.dtype)(array, types.int64), codegen


@intrinsic
def load(typingctx, array, index):
    """array, flat index -> the LANES elements from there."""

    def codegen(context, builder, sig, args):
        return _load(builder, _element(context, builder, sig.args[0], args[0], args[1]))

    return vector(array, types.int64), codegen


@intrinsic
def load_first(typingctx, array, index, count):
    """array, flat index, count -> the first `count` elements from there, then zeros."""

    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        return _load_first(builder, pointer, args[2])

    return vector(array, types.int64, types.int64), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Writes LANES elements of array from a flat index."""

    def codegen(context, builder, sig, args):
        _store(builder, args[2], _element(context, builder, sig.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), codegen


@intrinsic
def store_first(typingctx, array, index, value, count):
    """Writes the first `count` lanes of value to array from a flat index."""

    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        _store_first(builder, args[2], pointer, args[3])
        return context.get_dummy_value()

    return types.void(array, types.int64, vector, types.int64), codegen


@intrinsic
def broadcast(typingctx, scalar):
    """float32 -> Vector with that value in every lane."""

    def codegen(context, builder, sig, args):
        return _splat(builder, args[0])

    return vector(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, sig, args):
        return _fma(builder, *args)

    return vector(vector, vector, vector), codegen


@intrinsic
def maximum(typingctx, a, b):
    """The larger of each pair of lanes; b where either is NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), codegen


@intrinsic
def minimum(typingctx, a, b):
    """The smaller of each pair of lanes; b where either is NaN."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return vector(vector, vector), codegen


@intrinsic
def keep_first(typingctx, value, count):
    """value in the first `count` lanes, zero in the others."""

    def codegen(context, builder, sig, args):
        return builder.select(_first_lanes(builder, args[1]), args[0], _constant(0.0))

    return vector(vector, types.int64), codegen


@intrinsic
def nearest(typingctx, a):
    """Each lane rounded to the nearest integer, ties to even."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.nearbyint.v{LANES}f32", VECTOR, args[0])

    return vector(vector), codegen


@intrinsic
def square_root(typingctx, a):
    """The square root of each lane."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.sqrt.v{LANES}f32", VECTOR, args[0])

    return vector(vector), codegen


@intrinsic
def power_of_two(typingctx, n):
    """2**n for integral lanes from -126 to 127, by writing the exponent's bits."""

    def codegen(context, builder, sig, args):
        # Adding 1.5 * 2**23 leaves the integer in the low bits: no conversion that is undefined
        # for NaN.
        shifted = builder.fadd(args[0], _constant(12582912.0))
        bits = builder.add(builder.bitcast(shifted, INTEGERS), ir.Constant(INTEGERS, [127] * LANES))
        return builder.bitcast(builder.shl(bits, ir.Constant(INTEGERS, [23] * LANES)), VECTOR)

    return vector(vector), codegen


@intrinsic
def lane_sum(typingctx, a):
    """The sum of all lanes, added pairwise in a fixed order."""

    def codegen(context, builder, sig, args):
        return _fold(builder, args[0], builder.fadd)

    return types.float32(vector), codegen


@intrinsic
def lane_maximum(typingctx, a):
    """The largest lane."""

    def codegen(context, builder, sig, args):
        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return _fold(builder, args[0], larger)

    return types.float32(vector), codegen


def _fold(builder, value, combine):
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        halves = [
            builder.shuffle_vector(
                value,
                undefined,
                ir.Constant(ir.VectorType(I32, width), list(range(start, start + width))),
            )
            for start in (0, width)
        ]
        value = combine(*halves)
    return builder.extract_element(value, I32(0))


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
            argument if kind == vector else _splat(builder, argument)
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


@intrinsic
def dropout_factors(typingctx, key, index, threshold, scale):
    """scale in the lanes that dropout keeps, zero in those that it drops.

    The lane at flat position i is kept when the 32-bit hash of (key, i) is at least threshold:
    the finaliser of MurmurHash3 (Appleby 2011), with both halves of the 64-bit key mixed in.
    """

    def codegen(context, builder, sig, args):
        key, index, threshold, scale = args
        low, high = builder.trunc(key, I32), builder.trunc(builder.lshr(key, I64(32)), I32)

        def words(value):
            return ir.Constant(INTEGERS, [value] * LANES)

        def mix(x, shift):
            return builder.xor(x, builder.lshr(x, words(shift)))

        lane = ir.Constant(INTEGERS, list(range(LANES)))
        x = builder.add(_splat(builder, builder.trunc(index, I32)), lane)
        x = mix(builder.xor(x, _splat(builder, low)), 16)
        x = mix(builder.mul(x, words(0x85EBCA6B)), 13)
        x = mix(builder.mul(builder.add(x, _splat(builder, high)), words(0xC2B2AE35)), 16)
        kept = builder.icmp_unsigned(">=", x, _splat(builder, builder.trunc(threshold, I32)))
        return builder.select(kept, _splat(builder, scale), _constant(0.0))

    return vector(types.uint64, types.int64, types.int64, types.float32), codegen


@intrinsic
def transpose_tile(typingctx, source, source_stride, target, target_stride):
    """Writes the transpose of a LANES x LANES tile: target[j, i] = source[i, j].

    log2(LANES) rounds of exchanging blocks between pairs of registers; strides in elements.
    """

    def codegen(context, builder, sig, args):
        source, source_stride, target, target_stride = args
        rows = [
            _load(builder, builder.gep(source, [builder.mul(source_stride, I64(i))]))
            for i in range(LANES)
        ]
        block = 1
        while block < LANES:
            low = [e if not e & block else LANES + e - block for e in range(LANES)]
            high = [e + block if not e & block else LANES + e for e in range(LANES)]
            for i in range(LANES):
                if not i & block:
                    pair = rows[i], rows[i + block]
                    rows[i] = builder.shuffle_vector(*pair, ir.Constant(INTEGERS, low))
                    rows[i + block] = builder.shuffle_vector(*pair, ir.Constant(INTEGERS, high))
            block *= 2
        for j in range(LANES):
            _store(builder, rows[j], builder.gep(target, [builder.mul(target_stride, I64(j))]))
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), codegen


# ---------------------------------------------------------------- the micro-kernel

_POINTER = F32.as_pointer()


def _tile_function(module, rows, vectors):
    """IR function: one tile of `rows` x `vectors` registers; defined once a module.

    c[i, j] = sum_k a[i, k] b[k, j], plus bias[j] and plus[i, j] where these are not null. a is
    walked by two strides, so that it may lie transposed; b is a packed panel.
    """
    name = f"smallmind_tile_{rows}x{vectors}"
    if name in module.globals:
        return module.globals[name]
    kind = ir.FunctionType(
        ir.VoidType(),
        [_POINTER, I64, I64, _POINTER, I64, _POINTER, I64, I64, I64, _POINTER, I64, _POINTER],
    )
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    a, a_row, a_column, b, b_row, c, c_row, depth, columns, plus, plus_row, bias = function.args
    entry = function.append_basic_block("entry")
    loop = function.append_basic_block("along_k")
    done = function.append_basic_block("done")

    builder = ir.IRBuilder(entry)
    a_rows = [builder.gep(a, [builder.mul(a_row, I64(i))]) for i in range(rows)]
    builder.cbranch(builder.icmp_signed(">", depth, I64(0)), loop, done)

    builder.position_at_end(loop)
    k = builder.phi(I64)
    k.add_incoming(I64(0), entry)
    sums = [[builder.phi(VECTOR) for _ in range(vectors)] for _ in range(rows)]
    b_k = builder.gep(b, [builder.mul(k, b_row)])
    a_k = builder.mul(k, a_column)
    b_values = [_load(builder, builder.gep(b_k, [I64(v * LANES)])) for v in range(vectors)]
    added = []
    for i in range(rows):
        a_value = _splat(builder, builder.load(builder.gep(a_rows[i], [a_k])))
        added.append(
            [_fma(builder, a_value, b_values[v], sums[i][v]) for v in range(vectors)],
        )
    following = builder.add(k, I64(1))
    k.add_incoming(following, loop)
    for i in range(rows):
        for v in range(vectors):
            sums[i][v].add_incoming(_constant(0.0), entry)
            sums[i][v].add_incoming(added[i][v], loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

    builder.position_at_end(done)
    result: list[list[ir.Value]] = []
    for i in range(rows):
        result.append([])
        for v in range(vectors):
            value = builder.phi(VECTOR)
            value.add_incoming(_constant(0.0), entry)
            value.add_incoming(added[i][v], loop)
            result[i].append(value)
    whole = builder.icmp_signed("==", columns, I64(vectors * LANES))
    remaining = builder.sub(columns, I64((vectors - 1) * LANES))
    with builder.if_else(whole, likely=True) as (plain, edge):
        for branch, partial in ((plain, False), (edge, True)):
            with branch:
                _finish_tile(
                    builder,
                    result,
                    (bias, plus, plus_row, c, c_row),
                    remaining if partial else None,
                )
    builder.ret_void()
    return function


def _finish_tile(builder, result, operands, remaining):
    """Adds bias and plus to the sums, writes them; `remaining` lanes count in the last column."""
    bias, plus, plus_row, c, c_row = operands
    vectors = len(result[0])

    def read(pointer, v):
        place = builder.gep(pointer, [I64(v * LANES)])
        if remaining is not None and v == vectors - 1:
            return _load_first(builder, place, remaining)
        return _load(builder, place)

    def add_where_given(values, pointer, row_stride):
        before = builder.block
        given = builder.icmp_unsigned("!=", builder.ptrtoint(pointer, I64), I64(0))
        with builder.if_then(given):
            added = [
                [
                    builder.fadd(
                        value, read(builder.gep(pointer, [builder.mul(row_stride, I64(i))]), v)
                    )
                    for v, value in enumerate(row)
                ]
                for i, row in enumerate(values)
            ]
            inside = builder.block
        merged: list[list[ir.Value]] = []
        for row, row_added in zip(values, added, strict=True):
            merged.append([])
            for value, value_added in zip(row, row_added, strict=True):
                phi = builder.phi(VECTOR)
                phi.add_incoming(value, before)
                phi.add_incoming(value_added, inside)
                merged[-1].append(phi)
        return merged

    result = add_where_given(result, bias, I64(0))
    result = add_where_given(result, plus, plus_row)
    for i, row in enumerate(result):
        c_i = builder.gep(c, [builder.mul(c_row, I64(i))])
        for v, value in enumerate(row):
            place = builder.gep(c_i, [I64(v * LANES)])
            if remaining is not None and v == vectors - 1:
                _store_first(builder, value, place, remaining)
            else:
                _store(builder, value, place)


@intrinsic
def null(typingctx):
    """The pointer that stands for `nothing to add` in multiply_tile."""

    def codegen(context, builder, sig, args):
        return ir.Constant(_POINTER, None)

    return types.CPointer(types.float32)(), codegen


@intrinsic
def _choose_tile(typingctx, operands):
    """The tile function for the rows and columns asked for, called with all other operands."""

    def codegen(context, builder, sig, args):
        unpacked = cgutils.unpack_tuple(builder, args[0])
        a, a_row, a_column, b, b_row, c, c_row, depth, rows, columns, plus, plus_row, bias = (
            unpacked
        )
        vectors = builder.sdiv(builder.add(columns, I64(LANES - 1)), I64(LANES))
        shape = builder.add(builder.mul(rows, I64(TILE_VECTORS + 1)), vectors)
        end = builder.append_basic_block("tile_done")
        switch = builder.switch(shape, end)
        for tile_rows in range(1, TILE_ROWS + 1):
            for tile_vectors in range(1, TILE_VECTORS + 1):
                function = _tile_function(builder.module, tile_rows, tile_vectors)
                block = builder.append_basic_block("tile")
                switch.add_case(I64(tile_rows * (TILE_VECTORS + 1) + tile_vectors), block)
                with builder.goto_block(block):
                    builder.call(
                        function,
                        [
                            a,
                            a_row,
                            a_column,
                            b,
                            b_row,
                            c,
                            c_row,
                            depth,
                            columns,
                            plus,
                            plus_row,
                            bias,
                        ],
                    )
                    builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(operands), codegen


_n, _p = types.int64, types.CPointer(types.float32)
_TILE = types.void(_p, _n, _n, _p, _n, _p, _n, _n, _n, _n, _p, _n, _p)


@native(_TILE)
def _tile(a, a_row, a_column, b, b_row, c, c_row, depth, rows, columns, plus, plus_row, bias):
    _choose_tile(
        (a, a_row, a_column, b, b_row, c, c_row, depth, rows, columns, plus, plus_row, bias)
    )


# Kernels reach the micro-kernel by a symbol instead of containing it: its two dozen tile functions
# are compiled once, not once more in every kernel that multiplies.
llvm.add_symbol("smallmind_multiply_tile", _tile.address)

# multiply_tile(a, a_row, a_column, b, b_row, c, c_row, depth, rows, columns, plus, plus_row, bias):
#   c (rows, columns) = a (rows, depth) b (depth, columns) [+ bias (columns,)] [+ plus]
# At most TILE_ROWS x PANEL. Pointers with strides in elements, null() for nothing to add; b must be
# readable up to the next multiple of LANES columns. The order of the sum over depth is the same in
# every shape of tile.
multiply_tile = types.ExternalFunction("smallmind_multiply_tile", _TILE)


# ---------------------------------------------------------------- functions of Vectors


@jit
def exp(x):
    """e**x in every lane, within 2e-7 relative; 0 below -87.3, infinity above 88.7, NaN for NaN.

    e**x = 2**n e**r with |r| <= ln(2)/2, e**r by a polynomial of degree 6 (Cephes, expf).
    """
    x = minimum(broadcast(np.float32(89.0)), maximum(broadcast(np.float32(-104.0)), x))
    n = nearest(x * np.float32(1.4426950408889634))
    r = fma(n, broadcast(np.float32(-0.693359375)), x)
    r = fma(n, broadcast(np.float32(2.12194440e-4)), r)
    p = broadcast(np.float32(1.9875691500e-4))
    p = fma(p, r, broadcast(np.float32(1.3981999507e-3)))
    p = fma(p, r, broadcast(np.float32(8.3334519073e-3)))
    p = fma(p, r, broadcast(np.float32(4.1665795894e-2)))
    p = fma(p, r, broadcast(np.float32(1.6666665459e-1)))
    p = fma(p, r, broadcast(np.float32(5.0000001201e-1)))
    p = fma(p * r, r, r) + np.float32(1.0)
    # In two factors, since 2**128 and 2**-150 are no float32 though their product with p may be.
    half = nearest(n * np.float32(0.5))
    return p * power_of_two(half) * power_of_two(n - half)
