"""The blocked product of matrices: one loop nest for every number type.

The result is cut into tiles that stay in registers or, on a matrix unit, in its tiles. A thread
goes through its part strip by strip; in a strip it goes through K block by block, and in a block
through panels of columns. How the operands of a strip and a panel are read is up to the packing of
their type: `float32` reads them in place where that is as fast, `converted`, `bfloat16_pairs`,
`bfloat16_quads` and `amx` pack what is stored in 16 bits. Strip and panel are scratch of bounded
size: no transposed copy of a matrix ever exists.

Sums along K are float32. If the result is too, they are kept in it; otherwise they are kept apart
until they are complete, and rounded once.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from smallmind.kernels.codegen.blocks import SIZES, is_quantised
from smallmind.kernels.codegen.choice import by_type, choice, chosen_number
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
    prefetch_to_write,
    store,
    store_first,
)
from smallmind.kernels.gelu import gelu_of
from smallmind.kernels.gemm import converted, float32, quantised
from smallmind.kernels.gemm.few_rows import MAX_FEW_ROWS, add_columns, add_rows
from smallmind.kernels.gemm.operands import Packed, finish, operands_of
from smallmind.kernels.gemm.packing import (
    BY_ROWS,
    MAX_DEPTH,
    MAX_STRIP_ROWS,
    PLAIN,
    TRANSPOSE_A,
    TRANSPOSE_B,
    Region,
    grid_region,
    padded_row,
    panel_start,
)
from smallmind.kernels.gemm.tile import (
    LINE,
    NULL,
    PANEL,
    Extent,
    Rows,
    Strip,
    advance,
    float32_at,
    is_float32,
    not_null,
)
from smallmind.kernels.number_types import BFLOAT16, BLOCK

MIN_PREFETCHED_ELEMENTS, FINISHED_TILES = ISA.prefetches_from, ISA.finished_tiles
PREFETCHED_PANELS = max(1, 256 // PANEL)  # panels of b that are prefetched together

# Scratch of a thread: a packed panel of b, a packed strip of a, which stays in the second-level
# cache, and the incomplete sums of a strip, which 16 bits need.
PANEL_SIZE = MAX_DEPTH * PANEL
PANEL_16 = (MAX_DEPTH + 1) * PANEL  # blocks begin at even numbers, so one may be deeper by one
# Half of the second-level cache of CPUs that multiply pairs.
STRIP_16 = (128 if ISA.pairs and not ISA.quads else 64) * 1024
SUMS_SIZE = 64 * 1024
# Rows of a strip whose words are read in place, so that b is packed seldom: as many as leave space
# for the incomplete sums of a panel.
IN_PLACE_ROWS = SUMS_SIZE // (PANEL + 16)
SCRATCH = PANEL_SIZE + float32.STRIP_SIZE
SCRATCH_16 = PANEL_16 + STRIP_16 + SUMS_SIZE


def _packing(array: Any) -> ModuleType:
    """Returns the module that packs and multiplies what is stored like this array."""
    if array.dtype == types.float32:
        return float32
    if array.dtype in SIZES:
        return quantised
    return _pairs() if ISA.pairs and array.dtype == types.int16 else converted


def _pairs() -> ModuleType:
    # Imported here, so that it is compiled only if it is used.
    if ISA.matrix_unit:
        from smallmind.kernels.gemm import amx

        return amx
    if ISA.quads:
        from smallmind.kernels.gemm import bfloat16_quads

        return bfloat16_quads
    from smallmind.kernels.gemm import bfloat16_pairs

    return bfloat16_pairs


def load_packing(a: np.ndarray) -> None:
    """Imports what products of this array call, before they are compiled."""
    if ISA.pairs and a.dtype == BFLOAT16:
        _pairs()


_height = chosen_number(_packing, "HEIGHT")  # rows of the result that are multiplied at a time
_reads_words = chosen_number(_packing, "READS_WORDS")  # rows of words are not packed
_packed_depth = choice(_packing, "packed_depth", inline=True)
_pack_a = choice(_packing, "pack_a", inline=True)
_pack_b = choice(_packing, "pack_b", inline=True)


def _multiply(a, *operands):
    """Calls `multiply_panel` for what is packed of a."""


@overload(_multiply, jit_options={"forceinline": True})
def _multiply_of(a, *operands):
    multiply = _packing(a).multiply

    def multiply_packed(a, *operands):
        multiply(*operands)

    return multiply_packed


@inline_jit
def packed_of(a, own):
    """own (SCRATCH or SCRATCH_16,) -> Packed."""
    if is_float32(a):
        return Packed(own[:PANEL_SIZE], own[PANEL_SIZE:SCRATCH], own[SCRATCH:])
    end = PANEL_16 + STRIP_16
    return Packed(own[:PANEL_16], own[PANEL_16:end], own[end:])


def _multiply_by_rows(a, *operands):
    """Calls `multiply_by_rows` for what is packed of a -> False where there is none."""


@overload(_multiply_by_rows, jit_options={"forceinline": True})
def _multiply_by_rows_of(a, *operands):
    multiply = getattr(_packing(a), "multiply_by_rows", None)
    if multiply is None:
        return lambda a, *operands: False  # noqa: ARG005
    return lambda a, *operands: multiply(*operands)  # noqa: ARG005


class DepthBlock(NamedTuple):
    """The part start..end of K that one pass over the panels multiplies."""

    start: int
    end: int
    next_end: int  # the end of the block after it
    depth: int  # of what is packed
    is_last: bool


class Ahead(NamedTuple):
    """Data to prefetch while a panel is multiplied."""

    a: Region
    b: Region


@called_jit
def is_few(M, variant):
    """-> True if a product has so few rows that nothing is packed. Those of a b^T: see
    `row_dots`.
    """
    if variant == TRANSPOSE_A:
        return M == 1
    return variant == PLAIN + BY_ROWS or (variant == PLAIN and M <= MAX_FEW_ROWS)


@called_jit
def single_columns(N, variant):
    """Returns the number of last columns that are computed as dot products.

    A vector costs as much for a few columns as for all its lanes; dot products cost less.
    """
    is_cheaper = variant == TRANSPOSE_B and N > LANES and N % LANES <= LANES // 4
    return N % LANES if is_cheaper else 0


@called_jit
def product_region(M, N, single, variant, height, worker, workers):
    """Returns the part of a result (M, N) that a worker computes, with the `single` last columns.

    Its rows are multiplied `height` at a time, unless they are few.
    """
    vectors = ceil_div(N - single, LANES)
    rows = 1 if is_few(M, variant) else height
    own = grid_region(M, vectors, workers, worker, variant % BY_ROWS, rows)
    right = own.right if own.right < vectors * LANES else N
    return Region(own.first, own.last, own.left, right)


@serial_jit
def gemm_alone(out, activation, a, b, bias, addend, variant, scratch):
    """Computes the product on the calling thread. scratch (1, SCRATCH)."""
    gemm_share(out, activation, a, b, bias, addend, variant, scratch[0], 0, 1)


@parallel_jit
def gemm_parallel(out, activation, a, b, bias, addend, variant, scratch):
    """Computes the product on all threads, with a row of scratch each."""
    workers = scratch.shape[0]
    for worker in prange(workers):
        own = scratch[worker]
        gemm_share(out, activation, a, b, bias, addend, variant, own, np.int64(worker), workers)


@parallel_jit
def gemm_packed(out, activation, a, b, bias, addend, variant, scratch):
    """Computes the product of what is stored in 16 bits, or of float32 with the bytes of blocks.

    out and addend may be float32; bias is as a.
    """
    workers = scratch.shape[0]
    for worker in prange(workers):
        operands = operands_of(out, activation, a, b, bias, addend, variant % BY_ROWS)
        packed = packed_of(a, borrow(scratch[worker]))
        gemm_part(operands, packed, variant, np.int64(worker), workers)


@jit
def gemm_part(operands, packed, form, worker, workers):
    """Computes the worker's part of the result: a rectangle of a grid that balances the work.

    form: the variant, and what may be added to it.
    """
    a, variant = operands.a, operands.variant
    M, N = operands.out.shape
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    step, single = _height(a), 0
    if is_float32(operands.b):
        single = single_columns(N, form)
    first, last, left, right = product_region(M, N, single, form, step, worker, workers)
    if first == last:
        return
    if is_few(M, form) and not is_quantised(operands.b):
        _gemm_few(operands.b, operands, packed.sums, Region(first, last, left, right))
        return
    single = single if right == N else 0
    right -= single
    if variant != TRANSPOSE_A and _multiply_by_rows(
        a, operands, packed, Region(first, last, left, right)
    ):
        return
    # CPUs of an instruction set sum K in the same blocks, and get the same bits.
    in_place = _reads_words(a) and variant != TRANSPOSE_A and K % 2 == 0
    max_depth = MAX_DEPTH
    if in_place:
        max_depth = 2 * MAX_DEPTH  # as many words
    elif is_float32(a) and variant == TRANSPOSE_A:
        max_depth = MAX_DEPTH // 2
    blocks = max(1, ceil_div(K, max_depth))
    row_size = padded_row(_packed_depth(a, ceil_div(K, blocks)) + 16)
    max_height = MAX_STRIP_ROWS
    if is_float32(a):
        # Strips may be short if packing b is free; they are long if packing takes time.
        max_height = MAX_STRIP_ROWS // 2 if variant == PLAIN else MAX_STRIP_ROWS
    elif in_place:
        max_height = IN_PLACE_ROWS // step * step
    else:
        max_height = min(MAX_STRIP_ROWS, STRIP_16 // row_size) // step * step
    # Strips of equal height: b is packed for each of them, however few rows it has.
    height = round_up(ceil_div(last - first, ceil_div(last - first, max_height)), step)
    # Sums that are complete after one block, or are added in place, need no space.
    has_space = is_float32(a) or blocks == 1 or _adds_in_place(operands)
    width = right - left if has_space else (SUMS_SIZE // height - 16) // LANES * LANES
    for row in range(first, last, height):
        end = min(last, row + height)
        for column in range(left, right, max(1, width)):
            _gemm_region(
                operands, packed, Region(row, end, column, min(right, column + width)), blocks
            )
        if single > 0:
            _gemm_few(operands.b, operands, packed.sums, Region(row, end, right, N))


def _few_of_float32(b, operands, _sums, region):
    """Computes a region of the result that has few rows or few columns: nothing is packed."""
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
    if operands.variant == TRANSPOSE_B:
        add_columns(sums, operands.a, b, region)
    else:
        add_rows(sums, operands.a, b, region)
    if operands.activation.size > 0:
        for i in range(first, last):
            _activate(operands.activation, out, Region(i, i + 1, left, right))


def _few_of_16_bits(b, operands, sums, region):
    """Computes as `_few_of_float32` does, with separate sums."""
    first, last, left, right = region
    width = SUMS_SIZE // (last - first)
    for column in range(left, right, width):
        part = Region(first, last, column, min(right, column + width))
        columns = part.right - column
        sums[: (last - first) * columns] = np.float32(0)
        add_rows(Rows(at(sums, 0), columns), operands.a, b, part)
        finish(operands, sums, 0, columns, part)


def _few_of_blocks(b, operands, sums, region):
    """Does nothing, as it is never called: see `quantised_rows`."""


_gemm_few = by_type(_few_of_float32, _few_of_16_bits, _few_of_blocks)


@inline_jit
def _adds_in_place(operands):
    """Returns True if sums of what is stored in 16 bits are kept in the result itself."""
    out, addend, bias = operands.out, operands.addend, operands.bias
    is_exact = is_float32(out) and (addend.size == 0 or is_float32(addend))
    # A matrix unit writes whole vectors, and adds no bias.
    return is_exact and bias.size == 0 and out.shape[1] % LANES == 0


@inline_jit
def _block(operands, number, blocks, K):
    a, unit = operands.a, 1
    if is_quantised(operands.b):
        unit = BLOCK
    elif not is_float32(a):
        unit = 2  # pairs stay together
    start, is_last = number * K // blocks // unit * unit, number == blocks - 1
    end = K if is_last else (number + 1) * K // blocks // unit * unit
    next_end = min(number + 2, blocks) * K // blocks
    return DepthBlock(start, end, next_end, _packed_depth(a, end - start), is_last)


@jit
def _gemm_region(operands, packed, region, blocks):
    """Computes a region of the result, block after block along K, panel after panel."""
    a, b, variant = operands.a, operands.b, operands.variant
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    first, last, left, right = region
    for number in range(blocks):
        block = _block(operands, number, blocks, K)
        start, end, depth = block.start, block.end, block.depth
        row, columns = padded_row(depth), operands.out.shape[1]
        strip = _pack_a(a, packed.strip, row, variant, start, end, first, last, columns)
        for k in range(ceil_div(right - left, PANEL)):
            part_left, part_right = panel_start(left, right, k), panel_start(left, right, k + 1)
            part = Region(first, last, part_left, part_right)
            panel = _pack_b(b, packed.panel, variant, start, end, part, depth)
            _multiply_panel(a, operands, packed.sums, strip, panel, part, block, region, k)


def _multiply_float32(a, operands, _sums, strip, panel, part, block, region, number):
    """The products of a strip and the panel of this number in a region -> sums in the result."""
    out, N = operands.out, operands.out.shape[1]
    rows, packed_to = panel
    prefetches = (
        operands.variant == TRANSPOSE_A and a.size + operands.b.size >= MIN_PREFETCHED_ELEMENTS
    )
    ahead = _ahead(region, block, number) if prefetches else Ahead(part, part)
    bias = NULL
    if block.is_last and operands.bias.size > 0:
        bias = at(operands.bias, part.left)
    # All tiles at once, or one by one, each prefetching its share.
    step = _height(a) if prefetches else part.last - part.first
    for row in range(part.first, part.last, step):
        place = row * N + part.left
        c, start = at(out, place), NULL
        if block.start > 0:
            start = c
        elif operands.addend.size > 0:
            start = at(operands.addend, place)
        extent = Extent(min(step, part.last - row), part.right - part.left, block.depth)
        tiles = _strip_from(strip, (row - part.first) // _height(a))
        _multiply(a, Rows(c, N), tiles, rows, extent, Rows(start, N), bias, packed_to)
        if prefetches:
            if not_null(packed_to):
                rows, packed_to = Rows(packed_to, part.right - part.left), NULL
            share, shares = (row - part.first) // step, ceil_div(part.last - part.first, step)
            _prefetch_share(operands.b, ahead.b, share, shares)
            _prefetch_share(a, ahead.a, share, shares)
    if block.is_last and part.right == region.right and operands.activation.size > 0:
        _activate(operands.activation, out, region)


def _multiply_16_bits(a, operands, sums, strip, panel, part, block, region, _number):
    """Computes as `_multiply_float32` does, with sums in the result or separate ones."""
    if not _adds_in_place(operands):
        _multiply_apart(operands, sums, strip, panel, part, block, region)
        return
    N = operands.out.shape[1]
    place = part.first * N + part.left
    c, addend = float32_at(operands.out, place), NULL
    if block.start > 0:
        addend = c
    elif operands.addend.size > 0:
        addend = float32_at(operands.addend, place)
    extent = Extent(part.last - part.first, part.right - part.left, block.depth)
    _multiply(a, Rows(c, N), strip, panel.rows, extent, Rows(addend, N), NULL, NULL)


_multiply_panel = by_type(_multiply_float32, _multiply_16_bits)


@inline_jit
def _strip_from(strip, tile):
    """Returns the strip from this tile on."""
    return Strip(advance(strip.start, tile * strip.tile), strip.tile, strip.row, strip.column)


@jit
def _ahead(region, block, panel):
    """Selects the data to prefetch while a panel of the region is multiplied.

    From b, a share of the rows of the panels that follow the PREFETCHED_PANELS of this one; from a,
    a share of the rows of the next block along K.
    """
    left, right = region.left, region.right
    panels = ceil_div(right - left, PANEL)
    begin = panel // PREFETCHED_PANELS * PREFETCHED_PANELS
    count = min(PREFETCHED_PANELS, panels - begin)
    k, k_end, following = block.start, block.end, begin + PREFETCHED_PANELS
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
            panel_start(left, right, min(panels, following + PREFETCHED_PANELS)),
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
def _activate(activation, out, region):
    """Writes activation = gelu(out) in a region, most of which is in the second-level cache.

    In one panel the rows are so short that the CPU waits for each line of the activation.
    """
    N = out.shape[1]
    tail = (region.right - region.left) % LANES
    for i in range(region.first, region.last):
        for j in range(region.left, region.right - LANES + 1, LANES):
            store(activation, i * N + j, gelu_of(load(out, i * N + j)))
        if tail:
            place = i * N + region.right - tail
            store_first(activation, place, gelu_of(load_first(out, place, tail)), tail)


@jit
def _multiply_apart(operands, sums, strip, panel, part, block, region):
    """The products of a strip and a panel -> sums, and from complete ones the result.

    A few tiles at a time, so that these are still in the first-level cache.
    """
    first, last, left, right = part
    height, adds = _height(operands.a), block.start > 0
    # Sums that are complete after one block are overwritten by the next tiles.
    is_only = block.is_last and not adds
    sums_row = PANEL if is_only else padded_row(region.right - region.left)
    step = height * FINISHED_TILES
    for row in range(first, last, step):
        rows = Region(row, min(last, row + step), left, right)
        place = 0 if is_only else left - region.left + (row - first) * sums_row
        c = Rows(at(sums, place), sums_row)
        tiles = _strip_from(strip, (row - first) // height)
        extent = Extent(rows.last - row, round_up(right - left, LANES), block.depth)
        if block.is_last:
            _prefetch_finished(operands, rows)
        addend = c if adds else Rows(NULL, 0)
        _multiply(operands.a, c, tiles, panel.rows, extent, addend, NULL, NULL)
        if block.is_last:
            finish(operands, sums, place, sums_row, rows)


@jit
def _prefetch_finished(operands, region):
    """Prefetches what `finish` reads and writes, which other cores may have written last."""
    N = operands.out.shape[1]
    for i in range(region.first, region.last):
        for place in range(i * N + region.left, i * N + region.right, LINE):
            prefetch_to_write(operands.out, place)
            if operands.activation.size > 0:
                prefetch_to_write(operands.activation, place)
            if operands.addend.size > 0:
                prefetch(operands.addend, place)


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


# Called through its symbol: one thread and many run the same code, compiled once.
@native("smallmind_gemm_share", _SHARE)
def gemm_share(out, activation, a, b, bias, addend, variant, scratch, worker, workers):
    """Computes the worker's part of a product of float32."""
    operands = operands_of(out, activation, a, b, bias, addend, variant % BY_ROWS)
    gemm_part(operands, packed_of(a, borrow(scratch)), variant, worker, workers)
