"""The blocked product of float32 matrices.

The result is cut into tiles that stay in registers (`tile.multiply_panel`). The variants differ
only in how they read memory: a is read in place, a transposed one usually packed by strips, tile
after tile, and a panel of b, at most DEPTH x PANEL, is packed so that a tile reads it sequentially.
Panel and strip are scratch of bounded size: no transposed copy of a matrix ever exists.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange, types

from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import (
    called_jit,
    inline_jit,
    jit,
    native,
    parallel_jit,
    serial_jit,
)
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    borrow,
    load,
    load_first,
    prefetch,
    store,
    store_first,
)
from smallmind.kernels.elementwise import gelu_of
from smallmind.kernels.gemm.few_rows import FEW, multiply_few
from smallmind.kernels.gemm.packing import (
    DEPTH,
    PLAIN,
    STRIP,
    TRANSPOSE_A,
    TRANSPOSE_B,
    Region,
    copy_rows,
    grid_region,
    pack_columns,
    pack_transposed,
    packed_tile,
    panel_start,
)
from smallmind.kernels.gemm.tile import (
    NULL,
    PANEL,
    TILE_ROWS,
    Extent,
    Rows,
    Strip,
    multiply_panel,
    not_null,
)

PACK_B_FROM = TILE_ROWS + 1  # from this many rows a packed panel of b is read again
PACK_A_FROM = 4 * PANEL if ISA.fast_shared_cache else 0  # columns of b that read a: measured
# From this many elements the operands of a^T b come from memory or from a shared cache; then what
# is needed next is prefetched during the multiplication, GROUP panels of b at a time. This pays off
# only if the CPU multiplies so fast that it waits for memory: measured.
FETCH_FROM = 2 * 1024 * 1024 if LANES == 16 else 1 << 62
GROUP = max(1, 256 // PANEL)

# Scratch of a thread: a packed panel of b, then a packed strip of a.
PANEL_SIZE = DEPTH * PANEL
STRIP_SIZE = STRIP // TILE_ROWS * packed_tile.py_func(DEPTH // 2)
SCRATCH = PANEL_SIZE + STRIP_SIZE


class Operands(NamedTuple):
    """out = a b in one of its variants [+ bias] [+ addend], activation = gelu(out).

    Missing operands are empty arrays.
    """

    out: Any
    activation: Any
    a: Any
    b: Any
    bias: Any
    addend: Any
    variant: int


@inline_jit
def operands_of(out, activation, a, b, bias, addend, variant):
    """-> Operands, without reference counting: see `borrow`."""
    return Operands(
        borrow(out), borrow(activation), borrow(a), borrow(b), borrow(bias), borrow(addend), variant
    )


class Packed(NamedTuple):
    """The scratch of a thread."""

    panel: Any
    strip: Any


class Block(NamedTuple):
    """The part start..end of K that one pass over the panels multiplies, and how."""

    start: int
    end: int
    next_end: int  # the end of the block after it
    packs_a: bool
    prefetches: bool


class Ahead(NamedTuple):
    """Data to prefetch while a panel is multiplied."""

    a: Region
    b: Region


@called_jit
def is_few(M, variant):
    """True if a product has so few rows that nothing is packed."""
    return M == 1 or (M <= FEW and variant != TRANSPOSE_A)


@called_jit
def single_columns(N, variant):
    """The number of last columns that are computed as dot products.

    A vector costs as much for a few columns as for all its lanes; dot products cost less.
    """
    is_cheaper = variant == TRANSPOSE_B and N > LANES and N % LANES <= LANES // 4
    return N % LANES if is_cheaper else 0


@called_jit
def product_region(M, N, variant, worker, workers):
    """The part of a result (M, N) that a worker computes."""
    vectors = ceil_div(N - single_columns(N, variant), LANES)
    height = 1 if is_few(M, variant) else TILE_ROWS
    own = grid_region(M, vectors, workers, worker, variant, height)
    right = own.right if own.right < vectors * LANES else N
    return Region(own.first, own.last, own.left, right)


@serial_jit
def gemm_alone(out, activation, a, b, bias, addend, variant, scratch):
    """The product on the calling thread. scratch (1, SCRATCH)."""
    gemm_share(out, activation, a, b, bias, addend, variant, scratch[0], 0, 1)


@parallel_jit
def gemm_parallel(out, activation, a, b, bias, addend, variant, scratch):
    """The product on all threads, with a row of scratch each."""
    workers = scratch.shape[0]
    for worker in prange(workers):
        own = scratch[worker]
        gemm_share(out, activation, a, b, bias, addend, variant, own, np.int64(worker), workers)


@jit
def _gemm_few(operands, region):
    """A region of the result that has few rows or few columns."""
    out, bias, addend = operands.out, operands.bias, operands.addend
    first, last, left, right = region
    for i in range(first, last):
        for j in range(left, right):
            start = np.float32(0)
            if addend.size > 0:
                start += addend[i, j]
            if bias.size > 0:
                start += bias[j]
            out[i, j] = start
    N = out.shape[1]
    sums = Rows(at(out, first * N + left), N)
    multiply_few(sums, operands.a, operands.b, operands.variant, region)
    if operands.activation.size > 0:
        for i in range(first, last):
            _activate(operands.activation, out, Region(i, i + 1, left, right))


@jit
def _gemm_strip(operands, packed, region):
    """A region of the result, block after block along K, panel after panel."""
    a, b, variant = operands.a, operands.b, operands.variant
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    packs_a = variant == TRANSPOSE_A and b.shape[1] >= PACK_A_FROM
    prefetches = variant == TRANSPOSE_A and a.size + b.size >= FETCH_FROM
    # Packed or not, K is summed in the same blocks: CPUs of an instruction set get the same bits.
    depth = DEPTH // 2 if variant == TRANSPOSE_A else DEPTH
    blocks = max(1, ceil_div(K, depth))
    for i in range(blocks):
        block = Block(
            i * K // blocks,
            (i + 1) * K // blocks,
            min(i + 2, blocks) * K // blocks,
            packs_a,
            prefetches,
        )
        if packs_a:
            pack_columns(packed.strip, a, block.start, block.end, region.first, region.last)
        for panel in range(ceil_div(region.right - region.left, PANEL)):
            column = panel_start(region.left, region.right, panel)
            last_column = panel_start(region.left, region.right, panel + 1)
            part = Region(region.first, region.last, column, last_column)
            ahead = _ahead(region, block, panel) if prefetches else Ahead(part, part)
            _gemm_panel(operands, packed, part, block, ahead)


@jit
def _ahead(region, block, panel):
    """Selects the data to prefetch while a panel of the region is multiplied.

    From b, a share of the rows of the panels that follow the GROUP of this one; from a, a share of
    the rows of the next block along K.
    """
    left, right = region.left, region.right
    panels = ceil_div(right - left, PANEL)
    begin = panel // GROUP * GROUP
    count = min(GROUP, panels - begin)
    k, k_end, following = block.start, block.end, begin + GROUP
    if following >= panels:
        k, k_end, following = block.end, block.next_end, 0
    rows, next_rows = k_end - k, block.next_end - block.end
    return Ahead(
        Region(
            block.end + next_rows * panel // panels,
            block.end + next_rows * (panel + 1) // panels,
            region.first,
            region.last,
        ),
        Region(
            k + rows * (panel - begin) // count,
            k + rows * (panel - begin + 1) // count,
            panel_start(left, right, following),
            panel_start(left, right, min(panels, following + GROUP)),
        ),
    )


@jit
def _prefetch_share(x, region, share, shares):
    """Divides the rows in a region of x into `shares` and prefetches the one numbered `share`."""
    rows = ceil_div(region.last - region.first, shares)
    first = region.first + share * rows
    for row in range(first, min(region.last, first + rows)):
        for column in range(region.left, region.right, 16):
            prefetch(x, row * x.shape[1] + column)


@jit
def _gemm_panel(operands, packed, region, block, ahead):
    """One panel of the result for one block of K: packs b and multiplies."""
    out, b, bias, addend = operands.out, operands.b, operands.bias, operands.addend
    N = out.shape[1]
    K = operands.a.shape[0] if operands.variant == TRANSPOSE_A else operands.a.shape[1]
    first, last, left, right = region
    depth, columns = block.end - block.start, right - left
    width = round_up(columns, LANES)
    panel, packed_to = Rows(at(packed.panel, 0), width), NULL
    if operands.variant == TRANSPOSE_B:
        pack_transposed(packed.panel, b, block.start, block.end, left, right)
    elif columns < width:
        copy_rows(packed.panel, width, b, block.start * N + left, depth, columns)
    else:
        panel = Rows(at(b, block.start * N + left), N)
        if last - first >= PACK_B_FROM:
            packed_to = at(packed.panel, 0)
    panel_bias = at(bias, left) if block.end == K and bias.size > 0 else NULL
    # All tiles at once, or one by one, each prefetching its share.
    step = TILE_ROWS if block.prefetches else last - first
    for row in range(first, last, step):
        strip = _strip(operands, packed, block, first, row)
        start = NULL
        if block.start > 0:
            start = at(out, row * N + left)
        elif addend.size > 0:
            start = at(addend, row * N + left)
        extent = Extent(min(step, last - row), columns, depth)
        c = Rows(at(out, row * N + left), N)
        multiply_panel(c, strip, panel, extent, Rows(start, N), panel_bias, packed_to)
        if block.prefetches:
            if not_null(packed_to):
                panel, packed_to = Rows(packed_to, width), NULL
            tile, tiles = (row - first) // TILE_ROWS, ceil_div(last - first, TILE_ROWS)
            _prefetch_share(b, ahead.b, tile, tiles)
            _prefetch_share(operands.a, ahead.a, tile, tiles)
    if block.end == K and operands.activation.size > 0:
        _activate(operands.activation, out, region)


@jit
def _strip(operands, packed, block, first, row):
    """The left operand from `row` on, in place or in the packed strip, which begins at `first`."""
    a = operands.a
    if block.packs_a:
        size = packed_tile(block.end - block.start)
        return Strip(at(packed.strip, (row - first) // TILE_ROWS * size), size, 1, TILE_ROWS)
    if operands.variant == TRANSPOSE_A:
        M = a.shape[1]
        return Strip(at(a, block.start * M + row), TILE_ROWS, 1, M)
    K = a.shape[1]
    return Strip(at(a, row * K + block.start), TILE_ROWS * K, K, 1)


@jit
def _activate(activation, out, region):
    """activation = gelu(out) in a region, while it is in the first-level cache."""
    N = out.shape[1]
    tail = (region.right - region.left) % LANES
    for i in range(region.first, region.last):
        for j in range(region.left, region.right - LANES + 1, LANES):
            store(activation, i * N + j, gelu_of(load(out, i * N + j)))
        if tail:
            place = i * N + region.right - tail
            store_first(activation, place, gelu_of(load_first(out, place, tail)), tail)


_VECTOR, _MATRIX = (types.Array(types.float32, ndim, "C") for ndim in (1, 2))
_VECTOR_IN, _MATRIX_IN = (kind.copy(readonly=True) for kind in (_VECTOR, _MATRIX))
_SHARE = types.void(
    _MATRIX,
    _MATRIX,
    _MATRIX_IN,
    _MATRIX_IN,
    _VECTOR_IN,
    _MATRIX_IN,
    types.int64,
    _VECTOR,
    types.int64,
    types.int64,
)


# Called through its symbol: one thread and many run the same code, compiled once. It comes last
# because it is compiled when it is defined.
@native("smallmind_gemm_share", _SHARE)
def gemm_share(out, activation, a, b, bias, addend, variant, scratch, worker, workers):
    """The worker's share: a rectangle of tiles, from a grid that balances the work."""
    operands = operands_of(out, activation, a, b, bias, addend, variant)
    scratch = borrow(scratch)
    packed = Packed(scratch[:PANEL_SIZE], scratch[PANEL_SIZE:])
    M, N = out.shape
    own = product_region(M, N, variant, worker, workers)
    if own.first == own.last:
        return
    if is_few(M, variant):
        _gemm_few(operands, own)
        return
    single = single_columns(N, variant) if own.right == N else 0
    right = own.right - single
    # Strips may be short if packing b is free; they are long if packing takes time.
    height = STRIP // 2 if variant == PLAIN else STRIP
    for row in range(own.first, own.last, height):
        end = min(own.last, row + height)
        _gemm_strip(operands, packed, Region(row, end, own.left, right))
        if single > 0:
            _gemm_few(operands, Region(row, end, right, N))
