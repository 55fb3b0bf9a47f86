"""The transpose of a square tile, in registers: of vectors, or of numbers as they are."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from smallmind.kernels.codegen.operation import STORAGE
from smallmind.kernels.codegen.simd import HOST, LANES
from smallmind.kernels.codegen.vector_ir import I32, I64

TILE = 8  # rows and columns of what `move_tile` transposes


def _transpose_quarters(shuffle, groups):
    """One vector per group of rows -> pairs (q, the q-th quarters of all groups)."""
    if LANES == 4:
        return [(0, groups[0])]

    def quarters(x, y, *order):
        """Picks quarters of x, then of y, in this order."""
        return shuffle(x, y, (4 * q + i for q in order for i in range(4)))

    if LANES == 8:
        x, y = groups
        return [(0, quarters(x, y, 0, 2)), (1, quarters(x, y, 1, 3))]
    a, b, c, d = groups
    even, odd = (0, 2, 4, 6), (1, 3, 5, 7)
    even_ab, even_cd = quarters(a, b, *even), quarters(c, d, *even)
    odd_ab, odd_cd = quarters(a, b, *odd), quarters(c, d, *odd)
    return [
        (0, quarters(even_ab, even_cd, *even)),
        (1, quarters(odd_ab, odd_cd, *even)),
        (2, quarters(even_ab, even_cd, *odd)),
        (3, quarters(odd_ab, odd_cd, *odd)),
    ]


def store_transposed(builder, rows, target, stride):
    """Writes LANES vectors as the columns of a tile: target[j, i] = rows[i][j].

    First elements are shuffled within quarters of 128 bits, then the quarters: CPUs do either in
    one instruction. The stride counts elements.
    """
    quarters = range(0, LANES, 4)

    def shuffle(x, y, order):
        """Picks lanes of x, then of y, in this order."""
        return builder.shuffle_vector(x, y, ir.Constant(HOST.integers, list(order)))

    def in_quarters(x, y, *order):
        """Picks from the 4 lanes of x, then of y, within every quarter, in this order."""
        return shuffle(x, y, (q + i % 4 + i // 4 * LANES for q in quarters for i in order))

    # columns[j][g]: in quarter q, column 4 q + j of the four rows of group g.
    columns: list[list[ir.Value]] = [[], [], [], []]
    for a, b, c, d in zip(*[iter(rows)] * 4, strict=True):
        low, high = in_quarters(a, b, 0, 4, 1, 5), in_quarters(a, b, 2, 6, 3, 7)
        low2, high2 = in_quarters(c, d, 0, 4, 1, 5), in_quarters(c, d, 2, 6, 3, 7)
        columns[0].append(in_quarters(low, low2, 0, 1, 4, 5))
        columns[1].append(in_quarters(low, low2, 2, 3, 6, 7))
        columns[2].append(in_quarters(high, high2, 0, 1, 4, 5))
        columns[3].append(in_quarters(high, high2, 2, 3, 6, 7))

    for j, groups in enumerate(columns):
        for quarter, column in _transpose_quarters(shuffle, groups):
            place = builder.mul(stride, I64(4 * quarter + j))
            HOST.store(builder, column, builder.gep(target, [place]))


@intrinsic
def transpose_tile(typingctx, source, source_stride, target, target_stride):
    """Writes the transpose of a LANES x LANES tile: target[j, i] = source[i, j].

    Strides count elements.
    """

    def codegen(context, builder, sig, args):
        source, source_stride, target, target_stride = args
        storage = STORAGE[sig.args[0].dtype]
        rows = [
            HOST.load(builder, builder.gep(source, [builder.mul(source_stride, I64(i))]), storage)
            for i in range(LANES)
        ]
        store_transposed(builder, rows, target, target_stride)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), codegen


@intrinsic
def move_tile(typingctx, target, target_stride, source, source_stride):
    """Writes the transpose of a TILE x TILE tile of integers. Strides count elements."""

    def codegen(context, builder, sig, args):
        target, target_stride, source, source_stride = args
        size = sig.args[0].dtype.bitwidth
        vector = ir.VectorType(ir.IntType(size), TILE).as_pointer()

        def row(start, stride, i):
            return builder.bitcast(builder.gep(start, [builder.mul(stride, I64(i))]), vector)

        rows = [builder.load(row(source, source_stride, i), align=size // 8) for i in range(TILE)]
        # Each time row i and the one half a tile below it are shuffled like two halves of a pack
        # of cards. After as many times as there are bits in a row's number, columns are rows.
        for _ in range(TILE.bit_length() - 1):
            shuffled = []
            for a, b in zip(rows[: TILE // 2], rows[TILE // 2 :], strict=True):
                for half in range(0, TILE, TILE // 2):
                    order = [lane for i in range(half, half + TILE // 2) for lane in (i, TILE + i)]
                    mask = ir.Constant(ir.VectorType(I32, TILE), order)
                    shuffled.append(builder.shuffle_vector(a, b, mask))
            rows = shuffled
        for i, value in enumerate(rows):
            builder.store(value, row(target, target_stride, i), align=size // 8)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), codegen
