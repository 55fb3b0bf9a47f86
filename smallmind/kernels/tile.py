"""The micro-kernel of every matrix product: a tile of the result, held in registers along K."""

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from smallmind.kernels.compilation import native
from smallmind.kernels.isa import ISA
from smallmind.kernels.vector_ir import F32, I64, VectorIR

LANES = ISA.lanes
TILE_ROWS = ISA.tile_rows
TILE_VECTORS = ISA.tile_vectors
PANEL = LANES * TILE_VECTORS  # columns of a tile at its widest

FETCHED_AHEAD = 32  # rows of b between what is asked for and what is multiplied

_POINTER = F32.as_pointer()


def tile_function(module, isa, rows, vectors, transposed=False, packs=False, pairs=False):
    """IR function: one tile of `rows` x `vectors` registers; defined once a module.

    c[i, j] = sum_k a[i, k] b[k, j], plus bias[j] and plus[i, j] where these are not null. a_stride
    leads from a row of a to the next, or where a lies `transposed` from a column to the next; the
    other way its elements are neighbours. b is walked by rows, packed or in place. A function that
    `packs` writes what it reads of b to `packed`, row after row without gaps: that costs nothing,
    as multiplying leaves the units that load and store idle most of the time.

    With `pairs` an element of a and of b is two bfloat16 that follow each other along K.
    """
    ops = VectorIR(isa)
    name = f"smallmind_tile_{rows}x{vectors}" + "_transposed" * transposed + "_packs" * packs
    name += "_pairs" * pairs
    multiply_add = ops.dot_pairs if pairs else ops.add_product
    if name in module.globals:
        return module.globals[name]
    to_c = [_POINTER, I64, _POINTER, I64, _POINTER, I64, I64, I64]
    kind = ir.FunctionType(ir.VoidType(), [*to_c, _POINTER, I64, _POINTER, _POINTER])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    a, a_stride, b, b_row, c, c_row, depth, columns, plus, plus_row, bias, packed = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    for i in range(rows):
        c_i = builder.gep(c, [builder.mul(c_row, I64(i))])
        for v in range(0, vectors, max(1, 16 // ops.lanes)):
            ops.prefetch(builder, builder.gep(c_i, [I64(v * ops.lanes)]), write=True)

    def step(k, sums):
        """Adds the products of column k of a and row k of b to the sums."""
        b_k = builder.gep(b, [builder.mul(k, b_row)])
        b_values = [
            ops.load(builder, builder.gep(b_k, [I64(v * ops.lanes)])) for v in range(vectors)
        ]
        if packs:
            # Rows of b lie too far apart for the CPU to guess the next.
            ahead = builder.gep(b_k, [builder.mul(b_row, I64(FETCHED_AHEAD))])
            for v in range(0, vectors, max(1, 16 // ops.lanes)):
                ops.prefetch(builder, builder.gep(ahead, [I64(v * ops.lanes)]), locality=2)
            packed_k = builder.gep(packed, [builder.mul(k, I64(vectors * ops.lanes))])
            for v, value in enumerate(b_values):
                ops.store(builder, value, builder.gep(packed_k, [I64(v * ops.lanes)]))
        added = []
        for i in range(rows):
            if transposed:
                place = builder.gep(builder.gep(a, [builder.mul(k, a_stride)]), [I64(i)])
            else:
                place = builder.gep(builder.gep(a, [builder.mul(a_stride, I64(i))]), [k])
            a_value = ops.splat(builder, builder.load(place))
            added += [
                multiply_add(builder, sums[i * vectors + v], a_value, b_values[v])
                for v in range(vectors)
            ]
        return added

    sums = [ops.constant(0.0)] * (rows * vectors)
    first = I64(0)
    unrolled = isa.unrolled if rows == isa.tile_rows and not packs else 1
    if unrolled > 1:
        end = builder.sub(depth, I64(unrolled - 1))
        first, sums = _loop(builder, ops, first, end, unrolled, sums, step)
    _, sums = _loop(builder, ops, first, depth, 1, sums, step)
    result = [sums[i * vectors : (i + 1) * vectors] for i in range(rows)]

    whole = builder.icmp_signed("==", columns, I64(vectors * ops.lanes))
    remaining = builder.sub(columns, I64((vectors - 1) * ops.lanes))
    with builder.if_else(whole, likely=True) as (plain, edge):
        for branch, partial in ((plain, False), (edge, True)):
            with branch:
                _finish_tile(
                    ops,
                    builder,
                    result,
                    (bias, plus, plus_row, c, c_row),
                    remaining if partial else None,
                )
    builder.ret_void()
    return function


def _loop(builder, ops, first, end, unrolled, sums, step):
    """`sums = step(k, sums)` for k from first while k < end, `unrolled` of them at a time.

    Returns the k that it came to and the sums.
    """
    before = builder.block
    loop, done = builder.append_basic_block("along_k"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", first, end), loop, done)

    builder.position_at_end(loop)
    k = builder.phi(I64)
    inside = [builder.phi(ops.vector) for _ in sums]
    added = inside
    for u in range(unrolled):
        added = step(builder.add(k, I64(u)), added)
    following = builder.add(k, I64(unrolled))
    k.add_incoming(first, before)
    k.add_incoming(following, loop)
    for phi, start, value in zip(inside, sums, added, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, done)

    builder.position_at_end(done)
    k_done = builder.phi(I64)
    k_done.add_incoming(first, before)
    k_done.add_incoming(following, loop)
    result = [builder.phi(ops.vector) for _ in sums]
    for phi, start, value in zip(result, sums, added, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, loop)
    return k_done, result


def _finish_tile(ops, builder, result, operands, remaining):
    """Adds bias and plus to the sums, writes them; `remaining` lanes count in the last column."""
    bias, plus, plus_row, c, c_row = operands
    vectors = len(result[0])

    def read(pointer, v):
        place = builder.gep(pointer, [I64(v * ops.lanes)])
        if remaining is not None and v == vectors - 1:
            return ops.load_first(builder, place, remaining)
        return ops.load(builder, place)

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
                phi = builder.phi(ops.vector)
                phi.add_incoming(value, before)
                phi.add_incoming(value_added, inside)
                merged[-1].append(phi)
        return merged

    result = add_where_given(result, bias, I64(0))
    result = add_where_given(result, plus, plus_row)
    for i, row in enumerate(result):
        c_i = builder.gep(c, [builder.mul(c_row, I64(i))])
        for v, value in enumerate(row):
            place = builder.gep(c_i, [I64(v * ops.lanes)])
            if remaining is not None and v == vectors - 1:
                ops.store_first(builder, value, place, remaining)
            else:
                ops.store(builder, value, place)


@intrinsic
def null(typingctx):
    """The pointer that stands for `nothing` in multiply_panel."""

    def codegen(context, builder, sig, args):
        return ir.Constant(_POINTER, None)

    return types.CPointer(types.float32)(), codegen


@intrinsic
def is_given(typingctx, pointer):
    """Whether a pointer is not null()."""

    def codegen(context, builder, sig, args):
        return builder.icmp_unsigned("!=", args[0], ir.Constant(_POINTER, None))

    return types.boolean(pointer), codegen


def tile_chooser(pairs):
    @intrinsic
    def choose_tile(typingctx, operands):
        """The tile function for the rows and columns asked for, called with all other operands."""

        def codegen(context, builder, sig, args):
            _call_tile(builder, cgutils.unpack_tuple(builder, args[0]), pairs)
            return context.get_dummy_value()

        return types.void(operands), codegen

    return choose_tile


def _call_tile(builder, operands, pairs):
    a, a_row, a_column, *others = operands
    rows, columns, packed = others[5], others[6], others[-1]
    arguments = others[:5] + others[6:]
    transposed = builder.icmp_signed("!=", a_column, I64(1))
    arguments = [a, builder.select(transposed, a_column, a_row), *arguments]
    vectors = builder.sdiv(builder.add(columns, I64(LANES - 1)), I64(LANES))
    # A packing tile has all its rows; its number is that of one row more.
    packs = builder.icmp_unsigned("!=", builder.ptrtoint(packed, I64), I64(0))
    rows = builder.select(packs, I64(TILE_ROWS + 1), rows)
    rows = builder.add(rows, builder.select(transposed, I64(TILE_ROWS + 1), I64(0)))
    shape = builder.add(builder.mul(rows, I64(TILE_VECTORS + 1)), vectors)
    end = builder.append_basic_block("tile_done")
    switch = builder.switch(shape, end)
    for number in range(1, 2 * TILE_ROWS + 3):
        lies_transposed, tile_rows = number > TILE_ROWS + 1, (number - 1) % (TILE_ROWS + 1) + 1
        if pairs and tile_rows > TILE_ROWS:
            continue  # pairs are packed before
        for tile_vectors in range(1, TILE_VECTORS + 1):
            function = tile_function(
                builder.module, ISA, min(tile_rows, TILE_ROWS), tile_vectors,
                transposed=lies_transposed, packs=tile_rows > TILE_ROWS, pairs=pairs,
            )  # fmt: skip
            block = builder.append_basic_block("tile")
            switch.add_case(I64(number * (TILE_VECTORS + 1) + tile_vectors), block)
            with builder.goto_block(block):
                builder.call(function, arguments)
                builder.branch(end)
    builder.position_at_end(end)


@intrinsic
def advance(typingctx, pointer, count):
    """pointer, count -> the pointer `count` elements on; null() stays null()."""

    def codegen(context, builder, sig, args):
        pointer, count = args
        absent = builder.icmp_unsigned("==", pointer, ir.Constant(_POINTER, None))
        return builder.select(absent, pointer, builder.gep(pointer, [count]))

    return types.CPointer(types.float32)(pointer, types.int64), codegen


_n, _p = types.int64, types.CPointer(types.float32)
PANEL_SIGNATURE = types.void(_p, _n, _n, _n, _p, _n, _p, _n, _n, _n, _n, _p, _n, _p, _p)
_choose_tile = tile_chooser(pairs=False)


@native(PANEL_SIGNATURE)
def _panel(
    a, a_tile, a_row, a_column, b, b_row, c, c_row, depth, rows, columns, plus, plus_row, bias,
    packed,
):  # fmt: skip
    for tile in range((rows + TILE_ROWS - 1) // TILE_ROWS):
        row = tile * TILE_ROWS
        _choose_tile(
            (
                advance(a, tile * a_tile), a_row, a_column, b, b_row,
                advance(c, row * c_row), c_row, depth, min(TILE_ROWS, rows - row), columns,
                advance(plus, row * plus_row), plus_row, bias, packed,
            )
        )  # fmt: skip
        if is_given(packed):
            b, b_row, packed = packed, (columns + LANES - 1) // LANES * LANES, null()


# Kernels reach the micro-kernel by a symbol instead of containing it: its two dozen tile functions
# are compiled once, not once more in every kernel that multiplies.
llvm.add_symbol("smallmind_multiply_panel", _panel.address)

# multiply_panel(
#     a, a_tile, a_row, a_column, b, b_row, c, c_row, depth, rows, columns, plus, plus_row, bias,
#     packed,
# ):
#   c (rows, columns) = a (rows, depth) b (depth, columns) [+ bias (columns,)] [+ plus]
# columns <= PANEL. Pointers with strides in elements, null() for nothing to add. TILE_ROWS rows of
# a start a_tile elements after those before; b must be readable up to the next multiple of LANES
# columns. If `packed` is not null(), the first tile writes what it reads of b to it, row after row
# without gaps, for the tiles below it: for that there must be TILE_ROWS rows at least and whole
# vectors of columns. The order of the sum over depth is the same in every shape of tile.
multiply_panel = types.ExternalFunction("smallmind_multiply_panel", PANEL_SIGNATURE)
