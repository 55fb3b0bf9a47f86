"""The micro-kernel of every matrix product: a tile of the result, held in registers along K."""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils, imputils
from numba.extending import intrinsic, typeof_impl

from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import jit, native
from smallmind.kernels.codegen.operation import element_pointer, operation
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import LINE_SIZE
from smallmind.kernels.codegen.vector_ir import F32, I32, I64, VectorIR

LANES = ISA.lanes
TILE_ROWS = ISA.tile_rows
TILE_VECTORS = ISA.tile_vectors
PANEL = LANES * TILE_VECTORS  # columns of a tile at its widest

FETCHED_AHEAD = 32  # rows of b between the one prefetched and the one multiplied
LINE = LINE_SIZE // 4  # elements in a cache line

_POINTER = F32.as_pointer()
FLOAT_POINTER = types.CPointer(types.float32)  # the same for Numba


def tile_function(
    module, isa, rows, vectors, transposed=False, packs=False, pairs=False, quads=False
):
    """Returns the IR function of one tile of `rows` x `vectors` registers; defined once per module.

    c[i, j] = sum_k a[i, k] b[k, j] + bias[j] + addend[i, j], without the last two if they are null.
    If `transposed`, a_stride is the distance between columns of a and the elements of a column are
    contiguous; otherwise it is that between rows, whose elements are contiguous. b is read row by
    row, packed or in place. A function that `packs` writes what it reads of b to `packed`, row
    after row without gaps: this is free, as the load and store units are idle most of the time.

    With `pairs`, an element of a or b is two bfloat16 that are adjacent along K. With `quads` too,
    but two elements of a row or column that are adjacent along K are adjacent in memory; a is
    `transposed` and the depth even.
    """
    ops = VectorIR(isa)
    name = f"smallmind_tile_{rows}x{vectors}" + "_transposed" * transposed + "_packs" * packs
    name += "_pairs" * pairs + "_quads" * quads
    multiply_add = ops.dot_pairs if pairs else ops.add_product
    by_lane = isa.by_lane and not pairs
    read_a = ops.splats_by_lane if by_lane else ops.splats
    together = ops.lanes if by_lane and transposed else 1  # elements of a column that are loaded
    if name in module.globals:
        return module.globals[name]
    to_c = [_POINTER, I64, _POINTER, I64, _POINTER, I64, I64, I64]
    kind = ir.FunctionType(ir.VoidType(), [*to_c, _POINTER, I64, _POINTER, _POINTER])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    a, a_stride, b, b_row, c, c_row, depth, columns, addend, addend_row, bias, packed = (
        function.args
    )
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    # The last element too: rows that are not aligned end in one more line.
    lines = [*range(0, vectors * ops.lanes, LINE), vectors * ops.lanes - 1]
    for i in range(rows):
        c_i = builder.gep(c, [builder.mul(c_row, I64(i))])
        for column in lines:
            ops.prefetch(builder, builder.gep(c_i, [I64(column)]), write=True)

    def of_a(i, k):
        """-> the pointer to a[i, k]."""
        row, column = (k, I64(i)) if transposed else (I64(i), k)
        return builder.gep(builder.gep(a, [builder.mul(row, a_stride)]), [column])

    def fetch(k):
        """Prefetches a line at a time what the tile below reads of a.

        The rows of a are short, so the CPU does not see in time where the next ones begin.
        """
        with builder.if_then(builder.icmp_signed("==", builder.and_(k, I64(LINE - 1)), I64(0))):
            for i in range(rows, 2 * rows):
                ops.prefetch(builder, of_a(i, k), locality=isa.prefetch_level)

    def step(k, sums):
        """Adds the products of column k of a and row k of b to the sums."""
        b_k = builder.gep(b, [builder.mul(k, b_row)])
        b_values = [
            ops.load(builder, builder.gep(b_k, [I64(v * ops.lanes)])) for v in range(vectors)
        ]
        if packs:
            # Rows of b are too far apart for the CPU to predict the next.
            ahead = builder.gep(b_k, [builder.mul(b_row, I64(FETCHED_AHEAD))])
            for column in lines:
                ops.prefetch(builder, builder.gep(ahead, [I64(column)]), locality=2)
            packed_k = builder.gep(packed, [builder.mul(k, I64(vectors * ops.lanes))])
            for v, value in enumerate(b_values):
                ops.store(builder, value, builder.gep(packed_k, [I64(v * ops.lanes)]))
        added = []
        for i in range(rows):
            if i % together == 0:
                a_values = read_a(builder, of_a(i, k), min(together, rows - i))
            a_value = a_values[i % together]
            added += [
                multiply_add(builder, sums[i * vectors + v], a_value, b_values[v])
                for v in range(vectors)
            ]
        return added

    def step_of_quads(k, sums):
        """Adds as `step` does, for k and k + 1. A sum has two rows and columns of the result."""
        a_k, b_k = of_a(0, k), builder.gep(b, [builder.mul(k, b_row)])
        a_values = [ops.load(builder, builder.gep(a_k, [I64(2 * i)])) for i in range(0, rows, 2)]
        added = list(sums)
        for v in range(2 * vectors):
            if v == 4:
                # There are no registers for all of b at once, which LLVM would load.
                fence = ir.FunctionType(ir.VoidType(), [])
                builder.asm(fence, "", "~{memory}", [], side_effect=True)
            b_value = ops.load(builder, builder.gep(b_k, [I64(4 * v)]))
            for i, a_value in enumerate(a_values):
                place = 2 * vectors * i + v
                added[place] = ops.add_quads(builder, added[place], a_value, b_value)
        return added

    zero, first = ops.constant(0.0), I64(0)
    if quads:
        blocks = [zero] * ((rows + 1) // 2 * 2 * vectors)
        _, blocks = write_loop(builder, ops, first, depth, 1, blocks, step_of_quads, None, length=2)
        result = _rows_of_blocks(builder, blocks, vectors)[:rows]
    else:
        sums = [zero] * (rows * vectors)
        unrolled = isa.unrolled if rows == isa.tile_rows and not packs else 1
        begin = fetch if rows == isa.tile_rows and not transposed else None
        if unrolled > 1:
            end = builder.sub(depth, I64(unrolled - 1))
            first, sums = write_loop(builder, ops, first, end, unrolled, sums, step, begin)
            begin = None
        _, sums = write_loop(builder, ops, first, depth, 1, sums, step, begin)
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
                    (bias, addend, addend_row, c, c_row),
                    remaining if partial else None,
                )
    builder.ret_void()
    return function


def _rows_of_blocks(builder, blocks, vectors):
    """Blocks of 2 rows x 2 columns, 2 `vectors` of them side by side -> rows of vectors."""
    rows: list[list[ir.Value]] = []
    for start in range(0, len(blocks), 2 * vectors):
        for first in (0, 2):
            mask = ir.Constant(ir.VectorType(I32, 4), [first, first + 1, first + 4, first + 5])
            sides = (blocks[place : place + 2] for place in range(start, start + 2 * vectors, 2))
            rows.append([builder.shuffle_vector(*both, mask) for both in sides])
    return rows


def write_loop(builder, ops, first, end, unrolled, sums, step, begin, length=1):
    """Writes the loop `while k < end: sums = step(k, sums); k += length`, unrolled, from k = first.

    Each iteration starts with begin(k), unless that is None. Returns the final k and the vectors.
    """
    before = builder.block
    loop, done = builder.append_basic_block("along_k"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", first, end), loop, done)

    builder.position_at_end(loop)
    k = builder.phi(I64)
    inside = [builder.phi(ops.vector) for _ in sums]
    added = inside
    if begin:
        begin(k)
    for u in range(unrolled):
        added = step(builder.add(k, I64(u * length)), added)
    following = builder.add(k, I64(unrolled * length))
    last = builder.block
    k.add_incoming(first, before)
    k.add_incoming(following, last)
    for phi, start, value in zip(inside, sums, added, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, last)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, done)

    builder.position_at_end(done)
    k_done = builder.phi(I64)
    k_done.add_incoming(first, before)
    k_done.add_incoming(following, last)
    result = [builder.phi(ops.vector) for _ in sums]
    for phi, start, value in zip(result, sums, added, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, last)
    return k_done, result


def _finish_tile(ops, builder, result, operands, remaining):
    """Adds bias and addend to the sums and writes them.

    remaining: the number of columns in the last vector, or None if it is whole.
    """
    bias, addend, addend_row, c, c_row = operands
    vectors = len(result[0])

    def read(pointer, v):
        place = builder.gep(pointer, [I64(v * ops.lanes)])
        if remaining is not None and v == vectors - 1:
            return ops.load_first(builder, place, remaining)
        return ops.load(builder, place)

    def add_unless_null(values, pointer, row_stride):
        before = builder.block
        is_present = builder.icmp_unsigned("!=", builder.ptrtoint(pointer, I64), I64(0))
        with builder.if_then(is_present):
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

    result = add_unless_null(result, bias, I64(0))
    result = add_unless_null(result, addend, addend_row)
    for i, row in enumerate(result):
        c_i = builder.gep(c, [builder.mul(c_row, I64(i))])
        for v, value in enumerate(row):
            place = builder.gep(c_i, [I64(v * ops.lanes)])
            if remaining is not None and v == vectors - 1:
                ops.store_first(builder, value, place, remaining)
            else:
                ops.store(builder, value, place)


class _Null:
    """The type of NULL."""


NULL = _Null()  # the pointer to a missing operand


@typeof_impl.register(_Null)
def _type_of_null(value, context):
    return FLOAT_POINTER


@imputils.lower_constant(types.CPointer)
def _constant_pointer(context, builder, kind, value):
    return context.get_constant_null(kind)


@operation(types.boolean, FLOAT_POINTER)
def not_null(builder, pointer):
    """Returns True if a pointer is not NULL."""
    return builder.icmp_unsigned("!=", pointer, ir.Constant(_POINTER, None))


@operation(FLOAT_POINTER, FLOAT_POINTER, types.int64)
def advance(builder, pointer, count):
    """pointer, count -> the pointer advanced by `count` elements; NULL stays NULL."""
    is_null = builder.icmp_unsigned("==", pointer, ir.Constant(_POINTER, None))
    return builder.select(is_null, pointer, builder.gep(pointer, [count]))


@intrinsic
def float32_at(typingctx, array, index):
    """-> the pointer to an element of an array of float32; for other types NULL, a constant.

    Also after a pointer instead of in an array.
    """
    is_float32 = array.dtype == types.float32

    def codegen(context, builder, sig, args):
        if not is_float32:
            return ir.Constant(_POINTER, None)
        return element_pointer(context, builder, sig.args[0], *args)

    return FLOAT_POINTER(array, types.int64), codegen


@intrinsic
def is_float32(typingctx, array):
    """Returns true, as a constant, if an array or a pointer is of float32."""
    found = ir.Constant(ir.IntType(1), int(array.dtype == types.float32))
    return types.boolean(array), lambda _context, _builder, _sig, _args: found


class Rows(NamedTuple):
    """A matrix in memory, row by row. Strides count elements, here and below."""

    start: Any  # pointer
    stride: int  # from a row to the next


class Strip(NamedTuple):
    """The left operand of a product, tile after tile: TILE_ROWS rows, or on a matrix unit 32."""

    start: Any  # pointer
    tile: int  # from the start of a tile to that of the next
    row: int
    column: int


class Extent(NamedTuple):
    """The result of a product is rows x columns, each element a sum of `depth` products."""

    rows: int
    columns: int
    depth: int


_ROWS = types.NamedTuple((FLOAT_POINTER, types.int64), Rows)
_STRIP = types.NamedTuple((FLOAT_POINTER, types.int64, types.int64, types.int64), Strip)
_EXTENT = types.NamedUniTuple(types.int64, 3, Extent)
PANEL_SIGNATURE = types.void(_ROWS, _STRIP, _ROWS, _EXTENT, _ROWS, FLOAT_POINTER, FLOAT_POINTER)


def tile_caller(pairs, quads=False):
    """Returns the intrinsic that calls the tile function for an extent of at most one tile.

    With `pairs` or `quads` elements are pairs of bfloat16: see `tile_function`.
    """

    @operation(types.void, *PANEL_SIGNATURE.args)
    def call_tile(builder, *arguments):
        *operands, bias, packed = arguments
        c, a, b, extent, addend = (cgutils.unpack_tuple(builder, x) for x in operands)
        _call_tile(builder, c, a, b, extent, addend, bias, packed, pairs, quads)

    return call_tile


def _call_tile(builder, c, a, b, extent, addend, bias, packed, pairs, quads):
    """Branches to the tile function of the same shape."""
    start, _, a_row, a_column = a
    rows, columns, depth = extent
    transposed = builder.icmp_signed("!=", a_column, I64(1))
    a_stride = builder.select(transposed, a_column, a_row)
    arguments = [start, a_stride, *b, *c, depth, columns, *addend, bias, packed]
    vectors = builder.sdiv(builder.add(columns, I64(LANES - 1)), I64(LANES))
    # A packing tile always has TILE_ROWS rows; it is numbered as if it had one more.
    packs = builder.icmp_unsigned("!=", builder.ptrtoint(packed, I64), I64(0))
    rows = builder.select(packs, I64(TILE_ROWS + 1), rows)
    rows = builder.add(rows, builder.select(transposed, I64(TILE_ROWS + 1), I64(0)))
    number = builder.add(builder.mul(rows, I64(TILE_VECTORS + 1)), vectors)
    end = builder.append_basic_block("tile_done")
    switch = builder.switch(number, end)
    for number in range(1, 2 * TILE_ROWS + 3):
        is_transposed, tile_rows = number > TILE_ROWS + 1, (number - 1) % (TILE_ROWS + 1) + 1
        is_packing = tile_rows > TILE_ROWS
        if (pairs or quads) and is_packing:
            continue  # they are packed before
        if quads and not is_transposed:
            continue
        for tile_vectors in range(1, TILE_VECTORS + 1):
            shape = (min(tile_rows, TILE_ROWS), tile_vectors)
            form = is_transposed, is_packing, pairs, quads
            function = tile_function(builder.module, ISA, *shape, *form)
            block = builder.append_basic_block("tile")
            switch.add_case(I64(number * (TILE_VECTORS + 1) + tile_vectors), block)
            with builder.goto_block(block):
                builder.call(function, arguments)
                builder.branch(end)
    builder.position_at_end(end)


@jit
def tile_operands(tile, c, a, extent, addend):
    """Returns the operands c, a, extent and addend of one tile."""
    row = tile * TILE_ROWS
    return (
        Rows(advance(c.start, row * c.stride), c.stride),
        Strip(advance(a.start, tile * a.tile), a.tile, a.row, a.column),
        Extent(min(TILE_ROWS, extent.rows - row), extent.columns, extent.depth),
        Rows(advance(addend.start, row * addend.stride), addend.stride),
    )


_call_float32_tile = tile_caller(pairs=False)


@native("smallmind_multiply_panel", PANEL_SIGNATURE)
def multiply_panel(c, a, b, extent, addend, bias, packed):
    """a (rows, depth), b (depth, columns) -> c (rows, columns) = a b [+ bias] [+ addend].

    columns <= PANEL. addend.start and bias may be NULL. b must be readable up to the next multiple
    of LANES columns. If `packed` is not NULL, the first tile writes what it reads of b to it, row
    after row without gaps, for the tiles below it: this needs at least TILE_ROWS rows, and whole
    vectors of columns. The sum over depth has the same order in every shape of tile.
    """
    for tile in range(ceil_div(extent.rows, TILE_ROWS)):
        c_tile, a_tile, tile_extent, addend_tile = tile_operands(tile, c, a, extent, addend)
        _call_float32_tile(c_tile, a_tile, b, tile_extent, addend_tile, bias, packed)
        if not_null(packed):
            b, packed = Rows(packed, round_up(extent.columns, LANES)), NULL
