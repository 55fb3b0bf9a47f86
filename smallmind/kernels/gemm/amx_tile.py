"""The micro-kernel of products on the matrix unit: two by two tiles of the result.

A tile register holds 16 rows of 16 words: of two bfloat16 each, or of one float32. One instruction
adds the product of two tiles of bfloat16 to a tile of sums: 16 x 16 x 32 multiplications. Each step
along K loads four tiles and multiplies four times.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from smallmind.kernels.codegen.operation import ANY, operation
from smallmind.kernels.codegen.simd import HOST
from smallmind.kernels.codegen.vector_ir import I64, Storage

TILE = 16  # rows of a tile register, and words in a row
# The tile registers: two by two for sums, two for a, two for b.
SUMS, LEFT, RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)
_I8 = ir.IntType(8)
_POINTER = _I8.as_pointer()


@operation(types.void, types.int64, types.int64)
def configure(builder, upper, lower):
    """Gives the upper tiles of a and of the sums `upper` rows, the lower ones `lower`."""
    configuration = cgutils.alloca_once(builder, ir.ArrayType(_I8, 64))
    place = builder.bitcast(configuration, _POINTER)
    rows = dict.fromkeys(RIGHT, _I8(TILE))
    rows |= dict.fromkeys((*SUMS[0], LEFT[0]), builder.trunc(upper, _I8))
    rows |= dict.fromkeys((*SUMS[1], LEFT[1]), builder.trunc(lower, _I8))
    # Byte 0: the kind of configuration; from 16 on, two bytes with the bytes of a row for each
    # tile register; from 48 on, a byte with the number of its rows.
    content = {0: _I8(1)}
    content |= {16 + 2 * tile: _I8(4 * TILE) for tile in rows}
    content |= {48 + tile: count for tile, count in rows.items()}
    for i in range(64):
        builder.store(content.get(i, _I8(0)), builder.gep(place, [I64(i)]))
    _call(builder, "ldtilecfg", place)


@operation(types.void)
def release(builder):
    """Leaves the tile registers, which a switch of threads would otherwise save."""
    _call(builder, "tilerelease")


@operation(types.void, ANY, ANY, ANY, types.int64, ANY, types.boolean, types.boolean)
def multiply_tiles(builder, c, a, b, depth, addend, two_down, two_across):
    """Computes c = a b [+ addend] for one or two tiles down and across."""
    c, a, b, addend = (cgutils.unpack_tuple(builder, rows) for rows in (c, a, b, addend))
    for down in (1, 2):
        for across in (1, 2):
            is_down, is_across = (
                builder.icmp_unsigned("==", two, two.type(count - 1))
                for two, count in ((two_down, down), (two_across, across))
            )
            with builder.if_then(builder.and_(is_down, is_across)):
                function = tiles_function(builder.module, down, across)
                builder.call(function, [*c, *a, *b, depth, *addend])


@operation(types.void, ANY, ANY, ANY, types.int64, ANY)
def multiply_tiles_beside(builder, c, a, b, depth, rounded):
    """Computes c = a b for whole tiles, two down and across, and rounds other sums meanwhile.

    rounded: `Rounded`, other sums and where they go.
    """
    c, a, b, rounded = (cgutils.unpack_tuple(builder, x) for x in (c, a, b, rounded))
    function = tiles_function(builder.module, 2, 2, rounds=True)
    null = ir.Constant(ir.FloatType().as_pointer(), None)
    builder.call(function, [*c, *a, *b, depth, null, I64(0), *rounded])


class Rounded(NamedTuple):
    """Complete sums (rows, 2 TILE) that are rounded after bias and addend are added."""

    sums: Any  # pointer to float32
    out: Any  # pointer to bfloat16, here and below
    bias: Any  # or NULL
    addend: Any  # or NULL
    stride: int  # between the rows of out, and those of the addend
    rows: int  # may be zero


def tiles_function(module, down, across, rounds=False):
    """-> the IR function that multiplies `down` x `across` tiles; defined once per module.

    One that `rounds` rounds rows of other sums in each step along K: the vector units are idle.
    """
    name = f"smallmind_amx_{down}x{across}" + "_rounds" * rounds
    if name in module.globals:
        return module.globals[name]
    pointer = ir.FloatType().as_pointer()
    rows = [pointer, I64]
    others = [pointer, *[ir.IntType(16).as_pointer()] * 3, I64, I64] if rounds else []
    kind = ir.FunctionType(ir.VoidType(), [*rows * 3, I64, *rows, *others])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    c, c_row, a, a_row, b, b_row, depth, addend, addend_row, *rounded = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    if rounds:
        count = rounded[-1]
        last_step = builder.sdiv(builder.sub(depth, I64(1)), I64(TILE))
        per_step = builder.add(builder.sdiv(count, builder.add(last_step, I64(1))), I64(1))

    def each(start, stride):
        """Yields (register, pointer) for each tile of sums, in a matrix from start on."""
        for i in range(down):
            row = builder.gep(start, [builder.mul(stride, I64(i * TILE))])
            for j in range(across):
                yield SUMS[i][j], builder.gep(row, [I64(j * TILE)])

    def transfer(name, tile, pointer, stride):
        place = builder.bitcast(pointer, _POINTER)
        _call(builder, name, _I8(tile), place, builder.mul(stride, I64(4)))

    is_absent = builder.icmp_unsigned("==", builder.ptrtoint(addend, I64), I64(0))
    with builder.if_else(is_absent) as (zero, add):
        with zero:
            for tile, _ in each(c, c_row):
                _call(builder, "tilezero", _I8(tile))
        with add:
            for tile, pointer in each(addend, addend_row):
                transfer("tileloadd64", tile, pointer, addend_row)
    with cgutils.for_range_slice(builder, I64(0), depth, I64(TILE), I64) as (k, _):
        for i in range(down):
            place = builder.gep(a, [builder.add(k, builder.mul(a_row, I64(i * TILE)))])
            transfer("tileloadd64", LEFT[i], place, a_row)
        for j in range(across):
            place = builder.gep(b, [builder.add(builder.mul(k, b_row), I64(j * TILE))])
            transfer("tileloadd64", RIGHT[j], place, b_row)
            for i in range(down):
                _call(builder, "tdpbf16ps", *map(_I8, (SUMS[i][j], LEFT[i], RIGHT[j])))
        if rounds:
            start = builder.mul(builder.sdiv(k, I64(TILE)), per_step)
            end = builder.add(start, per_step)
            end = builder.select(builder.icmp_signed("<", end, count), end, count)
            with cgutils.for_range_slice(builder, start, end, I64(1), I64) as (row, _):
                _round_row(builder, row, *rounded[:-1])
    for tile, pointer in each(c, c_row):
        transfer("tilestored64", tile, pointer, c_row)
    builder.ret_void()
    return function


def _round_row(builder, row, sums, out, bias, addend, stride):
    """Writes a row of sums, two vectors, in bfloat16, after those of bias and addend are added."""
    place = builder.mul(row, stride)
    source = builder.gep(sums, [builder.mul(row, I64(2 * TILE))])
    totals = [HOST.load(builder, builder.gep(source, [I64(i)])) for i in (0, TILE)]
    totals = _add_unless_null(builder, totals, bias, I64(0))
    totals = _add_unless_null(builder, totals, addend, place)
    both = HOST.round_two(builder, *totals)
    target = builder.bitcast(builder.gep(out, [place]), both.type.as_pointer())
    builder.store(both, target, align=2)


def _add_unless_null(builder, totals, pointer, place):
    """Adds two vectors of bfloat16, at a place after the pointer, unless that is NULL."""
    before, sums = builder.block, []
    is_present = builder.icmp_unsigned("!=", builder.ptrtoint(pointer, I64), I64(0))
    with builder.if_then(is_present):
        for total, i in zip(totals, (0, TILE), strict=True):
            term = builder.gep(pointer, [builder.add(place, I64(i))])
            sums.append(builder.fadd(total, HOST.load(builder, term, Storage.BFLOAT16)))
        inside = builder.block
    merged = []
    for total, added in zip(totals, sums, strict=True):
        merged.append(builder.phi(HOST.vector))
        merged[-1].add_incoming(total, before)
        merged[-1].add_incoming(added, inside)
    return merged


def _call(builder, name, *arguments):
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, arguments)
