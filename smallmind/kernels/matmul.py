"""Matrix products in three variants, one micro-kernel: a b, a^T b and a b^T.

The result is cut into tiles that stay in registers (`tile.multiply_panel`). What differs between
the variants is only how memory is walked: a is read in place, by rows or by columns, and a panel
of b, DEPTH x PANEL, is packed so that a tile reads it front to back. Where many panels read the
columns of a, a strip of it is packed as well, tile after tile. A panel and a strip are scratch of
bounded size, so no transposed copy of a matrix ever exists. Operands of 16 bits are converted as
they are packed (`half_product`).
"""

import llvmlite.binding as llvm
import numpy as np
from numba import carray, prange, types

from smallmind.kernels.compilation import called_jit, jit, native, parallel_jit, threads
from smallmind.kernels.gelu import gelu_of
from smallmind.kernels.panels import (
    DEPTH,
    PLAIN,
    STRIP,
    TRANSPOSE_A,
    TRANSPOSE_B,
    copy_rows,
    grid_rows,
    pack_columns,
    pack_transposed,
    packed_tile,
    panel_start,
    pieces,
)
from smallmind.kernels.scratch import scratch
from smallmind.kernels.simd import (
    LANES,
    at,
    broadcast,
    fma,
    lane_sum,
    load,
    load_first,
    prefetch,
    round_up,
    store,
    store_first,
)
from smallmind.kernels.tile import PANEL, TILE_ROWS, is_given, multiply_panel, null

# Panels of b from which on packing a transposed a pays: measured, as is FETCH_FROM.
PACK_A_FROM = 12 if LANES == 16 else 3
FEW = 4  # rows up to which a tile would leave most of its registers idle
ALONE = 128 * 1024  # elements of b up to which one thread is quicker than waking others
PACK_B_FROM = TILE_ROWS + 1  # rows from which the panel of b is read again after it is packed
SCRATCH = DEPTH * PANEL + STRIP // TILE_ROWS * (DEPTH // 2 * TILE_ROWS + 3 * 16)
CHUNK = 2048  # columns of b that `_add_rows` reads in one go: four rows of them stay in cache
# From so many elements on the operands of a^T b come from memory, or from a cache that is shared;
# then what is needed next is fetched while this is multiplied, GROUP panels of b at a time. It pays
# only where the CPU multiplies so fast that it waits for memory.
FETCH_FROM = 2 * 1024 * 1024 if LANES == 16 else 1 << 62
GROUP = max(1, 256 // PANEL)

_n, _p = types.int64, types.CPointer(types.float32)
_PART = types.void(_p, _p, _p, _p, _p, _p, _p, _n, _n, _n, _n, _n, _n)
_call_product_part = types.ExternalFunction("smallmind_product_part", _PART)

_NO_VECTOR = np.empty(0, np.float32)
_NO_MATRIX = np.empty((0, 0), np.float32)


def matmul(out, a, b, bias=None, plus=None):
    """a (M, K), b (K, N) -> out (M, N) = a b [+ bias (N,)] [+ plus (M, N)]. Writes out."""
    _product(out, None, a, b, bias, plus, PLAIN)


def matmul_gelu(out, before, a, b, bias=None):
    """a (M, K), b (K, N) -> before (M, N) = a b [+ bias (N,)], out = gelu(before). Writes both."""
    _product(before, out, a, b, bias, None, PLAIN)


def matmul_transpose_a(out, a, b, plus=None):
    """a (K, M), b (K, N) -> out (M, N) = a^T b [+ plus (M, N), which may be out]. Writes out."""
    _product(out, None, a, b, None, plus, TRANSPOSE_A)


def matmul_transpose_b(out, a, b, plus=None):
    """a (M, K), b (N, K) -> out (M, N) = a b^T [+ plus (M, N), which may be out]. Writes out."""
    _product(out, None, a, b, None, plus, TRANSPOSE_B)


def _product(out, activated, a, b, bias, plus, variant):
    activated = _NO_MATRIX if activated is None else activated
    bias = _NO_VECTOR if bias is None else bias
    plus = _NO_MATRIX if plus is None else plus
    if a.itemsize == 2:
        # Compiled only where it is used.
        from smallmind.kernels.half_product import half_product

        half_product(out, activated, a, b, bias, plus, variant)
        return
    size = b.size
    if size <= ALONE and len(out) * size <= 4 * ALONE:
        rows = _NO_MATRIX if len(out) == 1 else scratch(1, SCRATCH)  # one row packs nothing
        _product_alone(out, activated, a, b, bias, plus, variant, rows)
        return
    rows = scratch(threads(), SCRATCH)
    _product_parallel(out, activated, a, b, bias, plus, variant, rows, len(rows))


@called_jit
def _product_alone(out, activated, a, b, bias, plus, variant, scratch):
    _product_share(out, activated, a, b, bias, plus, variant, scratch, 0, 1)


@parallel_jit
def _product_parallel(out, activated, a, b, bias, plus, variant, scratch, workers):
    for worker in prange(workers):
        _product_share(
            out, activated, a, b, bias, plus, variant, scratch, np.int64(worker), workers
        )


@jit
def _product_share(out, activated, a, b, bias, plus, variant, scratch, worker, workers):
    M, N = out.shape
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    _call_product_part(
        at(out, 0), _pointer(activated), at(a, 0), at(b, 0), _pointer(bias), _pointer(plus),
        at(scratch, worker * SCRATCH), M, K, N, variant, worker, workers,
    )  # fmt: skip


@jit
def _pointer(array):
    return at(array, 0) if array.size > 0 else null()


@jit
def _product_part(out, activated, a, b, bias, plus, variant, scratch, worker, workers):
    """The worker's share: a rectangle of tiles, from a grid that gives all the same work."""
    M, N = out.shape
    # A vector for a few columns costs as much as for all its lanes; dot products cost less.
    single = N % LANES if variant == TRANSPOSE_B and N > LANES and N % LANES <= LANES // 4 else 0
    vectors = pieces(N - single, LANES)
    down = grid_rows(M, vectors, workers, variant)
    across = workers // down
    i, j = worker // across, worker % across
    first, last = M * i // down, M * (i + 1) // down
    if i >= down or first == last:
        return
    left, right = vectors * j // across * LANES, vectors * (j + 1) // across * LANES
    right = min(N - single, right)
    if M == 1 or (M <= FEW and variant != TRANSPOSE_A):
        part = (first, last, left, N if j == across - 1 else right)
        _product_few(out, activated, a, b, bias, plus, variant, part)
        return
    # By the shape alone, as it decides in what blocks a sum along K is taken.
    packs_a = variant == TRANSPOSE_A and pieces(N, PANEL) >= PACK_A_FROM
    # Where b is packed in passing, strips may be short; where packing costs, they are long.
    strip = STRIP if variant == TRANSPOSE_B or packs_a else STRIP // 2
    for row in range(first, last, strip):
        end = min(last, row + strip)
        _product_rows(
            out, activated, a, b, bias, plus, variant, scratch, (row, end, left, right, packs_a)
        )
        if single > 0 and j == across - 1:
            part = (row, end, N - single, N)
            _product_few(out, activated, a, b, bias, plus, variant, part)


@jit
def _product_rows(out, activated, a, b, bias, plus, variant, scratch, part):
    """Rows first..last, columns left..right of the result, block after block along K."""
    first, last, left, right, packs_a = part
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    panels = pieces(right - left, PANEL)
    fetches = variant == TRANSPOSE_A and a.size + b.size >= FETCH_FROM
    depth = DEPTH // 2 if packs_a or fetches else DEPTH
    blocks = max(1, pieces(K, depth))
    for block in range(blocks):
        start, end = block * K // blocks, (block + 1) * K // blocks
        if packs_a:
            pack_columns(scratch, DEPTH * PANEL, a, start, end, first, last)
        for panel in range(panels):
            column, last_column = (
                panel_start(left, right, panel),
                panel_start(left, right, panel + 1),
            )
            ahead = (np.int64(0), np.int64(0), left, left, np.int64(0), np.int64(0))
            if fetches:
                next_end = min(block + 2, blocks) * K // blocks
                ahead = _ahead(left, right, panel, start, end, next_end)
            _product_panel(
                out, activated, a, b, bias, plus, variant, scratch,
                (first, last, column, last_column, start, end, K, packs_a, fetches), ahead,
            )  # fmt: skip


@jit
def _ahead(left, right, panel, start, end, next_end):
    """What is fetched from memory while a panel is multiplied: rows and columns of b, rows of a.

    Of b the panels that come after those in the GROUP of this one, a part of their rows for each;
    of a the next block along K, a part of its rows for each panel of this block.
    """
    panels = pieces(right - left, PANEL)
    begin = panel // GROUP * GROUP
    count = min(GROUP, panels - begin)
    k, k_end, following = start, end, begin + GROUP
    if following >= panels:
        k, k_end, following = end, next_end, 0
    rows = k_end - k
    return (
        k + rows * (panel - begin) // count,
        k + rows * (panel - begin + 1) // count,
        panel_start(left, right, following),
        panel_start(left, right, min(panels, following + GROUP)),
        end + (next_end - end) * panel // panels,
        end + (next_end - end) * (panel + 1) // panels,
    )


@jit
def _fetch(x, first, last, left, right):
    """Asks for the cache lines of rows first..last, columns left..right of x."""
    for row in range(first, last):
        for column in range(left, right, 16):
            prefetch(x, row * x.shape[1] + column)


@jit
def _product_panel(out, activated, a, b, bias, plus, variant, scratch, part, ahead):
    """One panel of the result: rows first..last, columns column..last_column, K start..end."""
    first, last, column, last_column, start, end, K, packs_a, fetches = part
    M, N = out.shape
    depth = end - start
    columns = last_column - column
    width = round_up(columns, LANES)
    b_panel, b_row, packed = at(scratch, 0), width, null()
    if variant == TRANSPOSE_B:
        pack_transposed(scratch, b, start, depth, column, last_column, width)
    elif columns < width:
        copy_rows(scratch, 0, width, b, start * N + column, N, depth, columns)
    else:
        b_panel, b_row = at(b, start * N + column), N
        if last - first >= PACK_B_FROM:
            packed = at(scratch, 0)
    bias_panel = at(bias, column) if end == K and bias.size > 0 else null()
    # In one go, or tile by tile, with a share of what is to be fetched after each.
    step = TILE_ROWS if fetches else last - first
    b_first, b_last, b_left, b_right, a_first, a_last = ahead
    tiles = pieces(last - first, TILE_ROWS)
    b_share, a_share = pieces(b_last - b_first, tiles), pieces(a_last - a_first, tiles)
    for row in range(first, last, step):
        if packs_a:
            a_tile, a_row, a_column = packed_tile(depth), 1, TILE_ROWS
            a_strip = at(scratch, DEPTH * PANEL + (row - first) // TILE_ROWS * a_tile)
        elif variant == TRANSPOSE_A:
            a_strip, a_tile, a_row, a_column = at(a, start * M + row), TILE_ROWS, 1, M
        else:
            a_strip, a_tile, a_row, a_column = at(a, row * K + start), TILE_ROWS * K, K, 1
        plus_panel = null()
        if start > 0:
            plus_panel = at(out, row * N + column)
        elif plus.size > 0:
            plus_panel = at(plus, row * N + column)
        multiply_panel(
            a_strip, a_tile, a_row, a_column, b_panel, b_row, at(out, row * N + column), N,
            depth, min(step, last - row), columns, plus_panel, N, bias_panel, packed,
        )  # fmt: skip
        if fetches:
            if is_given(packed):
                b_panel, b_row, packed = packed, width, null()
            _fetch(b, b_first, min(b_last, b_first + b_share), b_left, b_right)
            _fetch(a, a_first, min(a_last, a_first + a_share), first, last)
            b_first, a_first = b_first + b_share, a_first + a_share
    if end == K and activated.size > 0:
        _activate(activated, out, first, last - first, column, last_column)


@jit
def _product_few(out, activated, a, b, bias, plus, variant, part):
    """A product with few rows, or few columns of it: its time is that of reading b, or a, once."""
    first, last, left, right = part
    for i in range(first, last):
        for j in range(left, right):
            start = np.float32(0)
            if plus.size > 0:
                start += plus[i, j]
            if bias.size > 0:
                start += bias[j]
            out[i, j] = start
    if variant == TRANSPOSE_B:
        N, K = b.shape
        flat = out.reshape(-1)
        if last - first <= right - left:
            for i in range(first, last):
                _add_dots(flat, i * N, 1, a, i * K, b, left, right)
        else:
            for j in range(left, right):
                _add_dots(flat, j, N, b, j * K, a, first, last)
    else:
        _add_rows(out, a, b, first, last, left, right)
    if activated.size > 0:
        for i in range(first, last):
            _activate(activated, out, i, 1, left, right)


@jit
def _add_dots(out, place, step, x, x_place, y, first, last):
    """out[place + step j] += x[x_place:] . y[j] for the rows first..last of y, four at a time."""
    K = y.shape[1]
    whole, tail = K - K % LANES, K % LANES
    fours = first + (last - first) // 4 * 4
    for j in range(first, fours, 4):
        s0 = s1 = s2 = s3 = broadcast(np.float32(0))
        for k in range(0, whole, LANES):
            u, v = load(x, x_place + k), j * K + k
            s0, s1 = fma(u, load(y, v), s0), fma(u, load(y, v + K), s1)
            s2, s3 = fma(u, load(y, v + 2 * K), s2), fma(u, load(y, v + 3 * K), s3)
        if tail:
            u, v = load_first(x, x_place + whole, tail), j * K + whole
            s0 = fma(u, load_first(y, v, tail), s0)
            s1 = fma(u, load_first(y, v + K, tail), s1)
            s2 = fma(u, load_first(y, v + 2 * K, tail), s2)
            s3 = fma(u, load_first(y, v + 3 * K, tail), s3)
        out[place + step * j] += lane_sum(s0)
        out[place + step * (j + 1)] += lane_sum(s1)
        out[place + step * (j + 2)] += lane_sum(s2)
        out[place + step * (j + 3)] += lane_sum(s3)
    for j in range(fours, last):
        total = broadcast(np.float32(0))
        for k in range(0, whole, LANES):
            total = fma(load(x, x_place + k), load(y, j * K + k), total)
        if tail:
            u = load_first(x, x_place + whole, tail)
            total = fma(u, load_first(y, j * K + whole, tail), total)
        out[place + step * j] += lane_sum(total)


@jit
def _add_rows(out, a, b, first, last, left, right):
    """out[i, j] += a[i] . b[:, j] for a part of out; of b, four rows are read at a time."""
    K, N = b.shape
    a = a.reshape(-1)  # a^T b of one row reads the same elements
    for begin in range(left, right, CHUNK):
        end = min(right, begin + CHUNK)
        whole = begin + (end - begin) // LANES * LANES
        for k in range(0, K - K % 4, 4):
            for i in range(first, last):
                x = i * K + k
                a0, a1 = broadcast(a[x]), broadcast(a[x + 1])
                a2, a3 = broadcast(a[x + 2]), broadcast(a[x + 3])
                for j in range(begin, whole, LANES):
                    y, z = k * N + j, i * N + j
                    s, t = fma(a0, load(b, y), load(out, z)), a1 * load(b, y + N)
                    s, t = fma(a2, load(b, y + 2 * N), s), fma(a3, load(b, y + 3 * N), t)
                    store(out, z, s + t)
        for k in range(K - K % 4, K):
            for i in range(first, last):
                a0 = broadcast(a[i * K + k])
                for j in range(begin, whole, LANES):
                    store(out, i * N + j, fma(a0, load(b, k * N + j), load(out, i * N + j)))
        if whole < end:
            n = end - whole
            for i in range(first, last):
                total = load_first(out, i * N + whole, n)
                for k in range(K):
                    a0 = broadcast(a[i * K + k])
                    total = fma(a0, load_first(b, k * N + whole, n), total)
                store_first(out, i * N + whole, total, n)


@jit
def _activate(activated, out, row, rows, column, end):
    """activated = gelu(out) on one tile, while it is in the first-level cache."""
    N = out.shape[1]
    for i in range(row, row + rows):
        for j in range(column, end - LANES + 1, LANES):
            store(activated, i * N + j, gelu_of(load(out, i * N + j)))
        tail = (end - column) % LANES
        if tail:
            place = i * N + end - tail
            store_first(activated, place, gelu_of(load_first(out, place, tail)), tail)


@native(_PART)
def _product_of_pointers(
    out, activated, a, b, bias, plus, scratch, M, K, N, variant, worker, workers
):  # fmt: skip
    a_shape = (K, M) if variant == TRANSPOSE_A else (M, K)
    b_shape = (N, K) if variant == TRANSPOSE_B else (K, N)
    _product_part(
        carray(out, (M, N)),
        carray(activated, (M if is_given(activated) else 0, N)),
        carray(a, a_shape),
        carray(b, b_shape),
        carray(bias, (N if is_given(bias) else 0,)),
        carray(plus, (M if is_given(plus) else 0, N)),
        variant,
        carray(scratch, (SCRATCH,)),
        worker,
        workers,
    )


# By symbol, as the micro-kernel: so that one thread and many run the same code, compiled once.
llvm.add_symbol("smallmind_product_part", _product_of_pointers.address)
