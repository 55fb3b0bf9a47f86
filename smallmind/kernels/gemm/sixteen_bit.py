"""Products of matrices that are stored in 16 bits and multiplied in float32.

Both operands are converted as they are packed, a strip of a and a panel of b at a time. If the CPU
multiplies bfloat16, they are packed in pairs instead of converted. Sums along K stay in float32
until they are complete; a result that is stored in 16 bits is rounded once.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from smallmind.kernels.codegen.choice import choice, chosen_number
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.scratch import scratch
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
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.elementwise import gelu_of
from smallmind.kernels.gemm import converted
from smallmind.kernels.gemm.blocked import is_few, operands_of
from smallmind.kernels.gemm.few_rows import multiply_few
from smallmind.kernels.gemm.packing import (
    DEPTH,
    STRIP,
    TRANSPOSE_A,
    Region,
    grid_region,
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
)

if ISA.matrix_unit:
    from smallmind.kernels.gemm import amx
elif ISA.pairs:
    from smallmind.kernels.gemm import bfloat16_pairs

# Scratch of a thread: a packed panel of b, a packed strip of a, which stays in the second-level
# cache, and the incomplete sums of a strip.
PANEL_SIZE = (DEPTH + 1) * PANEL  # blocks begin at even numbers, so one may be deeper by one
STRIP_SIZE = 64 * 1024
SUMS_SIZE = 64 * 1024
SCRATCH = PANEL_SIZE + STRIP_SIZE + SUMS_SIZE

# Tiles whose sums are finished while they are in the first-level cache. Vector arithmetic is slow
# right after a product on a matrix unit, where it follows a whole strip.
FINISHED = 12 if ISA.matrix_unit else 4


class Packed(NamedTuple):
    """The scratch of a thread."""

    panel: Any
    strip: Any
    sums: Any


def sixteen_bit_gemm(out, activation, a, b, bias, addend, variant):
    """a, b in 16 bits -> out, and activation = gelu(out) unless it is empty: see `Operands`.

    bias and activation are in 16 bits too, out and addend in 16 or 32.
    """
    rows = scratch(threads(), SCRATCH)
    _sixteen_bit_gemm(out, activation, a, b, bias, addend, variant, rows)


@parallel_jit
def _sixteen_bit_gemm(out, activation, a, b, bias, addend, variant, scratch):
    workers = scratch.shape[0]
    for worker in prange(workers):
        operands = operands_of(out, activation, a, b, bias, addend, variant)
        packed = divided_scratch(borrow(scratch[worker]))
        gemm_share(operands, packed, np.int64(worker), workers)


@jit
def divided_scratch(own):
    """own (SCRATCH,) -> Packed."""
    panel, strip = own[:PANEL_SIZE], own[PANEL_SIZE : PANEL_SIZE + STRIP_SIZE]
    return Packed(panel, strip, own[PANEL_SIZE + STRIP_SIZE :])


@jit
def gemm_share(operands, packed, worker, workers):
    """The worker's part of the result, strip after strip."""
    a, variant = operands.a, operands.variant
    M, N = operands.out.shape
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    vectors = ceil_div(N, LANES)
    few, step = is_few(M, variant), _height(a)
    own = grid_region(M, vectors, workers, worker, variant, 1 if few else step)
    first, last, left, right = own.first, own.last, own.left, min(N, own.right)
    if first == last:
        return
    if few:
        _gemm_few(operands, packed.sums, Region(first, last, left, right))
        return
    blocks = max(1, ceil_div(K, DEPTH))
    row_size = _padded_row(_packed_depth(a, ceil_div(K, blocks)) + 16)
    max_height = min(STRIP, STRIP_SIZE // row_size) // step * step
    # Strips of equal height: b is packed for each of them, however few rows it has.
    height = round_up(ceil_div(last - first, ceil_div(last - first, max_height)), step)
    # Sums that are complete after one block, or are added in place, need no space.
    has_space = blocks == 1 or _adds_in_place(operands)
    width = right - left if has_space else (SUMS_SIZE // height - 16) // LANES * LANES
    for row in range(first, last, height):
        for column in range(left, right, max(1, width)):
            region = Region(row, min(last, row + height), column, min(right, column + width))
            _gemm_region(operands, packed, region, blocks)


@jit
def _gemm_few(operands, sums, region):
    """A region of the result that has few rows: nothing is packed."""
    first, last, left, right = region
    if first == last:
        return
    width = SUMS_SIZE // (last - first)
    for column in range(left, right, width):
        part = Region(first, last, column, min(right, column + width))
        columns = part.right - column
        sums[: (last - first) * columns] = np.float32(0)
        multiply_few(Rows(at(sums, 0), columns), operands.a, operands.b, operands.variant, part)
        _finish(operands, sums, 0, columns, part)


@jit
def _padded_row(size):
    """Elements between rows of `size` elements in scratch: mostly an odd number of cache lines.

    With a power of two the rows of a tile would compete for few sets of the cache.
    """
    return round_up(size, 16) + 16


# `converted`, `bfloat16_pairs` and `amx` have functions of the same names, which pack and multiply.
# The one for an array is chosen at compile time.
def _packing(array) -> ModuleType:
    if not ISA.pairs or array.dtype != types.int16:
        return converted
    return amx if ISA.matrix_unit else bfloat16_pairs


_height = chosen_number(_packing, "HEIGHT")  # rows of the result that are multiplied at a time
_packed_depth = choice(_packing, "packed_depth")
_pack_a = choice(_packing, "pack_a")
_pack_b = choice(_packing, "pack_b")


def _multiply(a, *operands):
    """`multiply_panel` for what is packed of a."""


@overload(_multiply)
def _multiply_of(a, *operands):
    multiply = _packing(a).multiply

    def multiply_packed(a, *operands):
        multiply(*operands)

    return multiply_packed


@jit
def _adds_in_place(operands):
    """True if sums are kept in the result itself, which is in float32 and in whole vectors."""
    out, addend = operands.out, operands.addend
    is_exact = is_float32(out) and (addend.size == 0 or is_float32(addend))
    return is_exact and operands.bias.size == 0 and out.shape[1] % LANES == 0


@jit
def _gemm_region(operands, packed, region, blocks):
    """A region of the result, block after block along K, panel after panel."""
    a, b, variant = operands.a, operands.b, operands.variant
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    first, last, left, right = region
    for block in range(blocks):
        # Even, so that pairs stay together.
        start = block * K // blocks // 2 * 2
        end = K if block == blocks - 1 else (block + 1) * K // blocks // 2 * 2
        depth = _packed_depth(a, end - start)
        strip = _pack_a(a, packed.strip, _padded_row(depth), variant, start, end, first, last)
        for panel in range(ceil_div(right - left, PANEL)):
            column = panel_start(left, right, panel)
            last_column = panel_start(left, right, panel + 1)
            _pack_b(b, packed.panel, variant, start, end, column, last_column, depth)
            part = Region(first, last, column, last_column)
            if _adds_in_place(operands):
                _multiply_in_place(operands, packed, strip, part, depth, block > 0)
            else:
                row = PANEL if blocks == 1 else _padded_row(right - left)
                sums = Sums(0 if blocks == 1 else column - left, row, block, blocks)
                _multiply_apart(operands, packed, strip, part, depth, sums)


@jit
def _multiply_in_place(operands, packed, strip, region, depth, adds):
    """The products of a packed strip and panel -> the result, or += if it `adds`."""
    first, last, left, right = region
    N = operands.out.shape[1]
    place = first * N + left
    c, addend = float32_at(operands.out, place), NULL
    if adds:
        addend = c
    elif operands.addend.size > 0:
        addend = float32_at(operands.addend, place)
    panel = Rows(at(packed.panel, 0), right - left)
    extent = Extent(last - first, right - left, depth)
    _multiply(operands.a, Rows(c, N), strip, panel, extent, Rows(addend, N), NULL, NULL)


class Sums(NamedTuple):
    """Where the incomplete sums of a panel are, and of which block along K."""

    place: int
    row: int  # from a row to the next
    block: int
    blocks: int


@jit
def _multiply_apart(operands, packed, strip, region, depth, sums):
    """The products of a packed strip and panel -> sums, and from complete ones the result.

    A few tiles at a time, so that these are still in the first-level cache.
    """
    first, last, left, right = region
    width = round_up(right - left, LANES)
    panel, step = Rows(at(packed.panel, 0), width), _height(operands.a) * FINISHED
    is_last = sums.block == sums.blocks - 1
    for row in range(first, last, step):
        rows = Region(row, min(last, row + step), left, right)
        place = sums.place + (0 if sums.blocks == 1 else (row - first) * sums.row)
        c = Rows(at(packed.sums, place), sums.row)
        addend = c if sums.block > 0 else Rows(NULL, 0)
        tile = advance(strip.start, (row - first) // _height(operands.a) * strip.tile)
        own = Strip(tile, strip.tile, strip.row, strip.column)
        extent = Extent(rows.last - row, width, depth)
        if is_last:
            _prefetch_finished(operands, rows)
        _multiply(operands.a, c, own, panel, extent, addend, NULL, NULL)
        if is_last:
            _finish(operands, packed.sums, place, sums.row, rows)


@jit
def _prefetch_finished(operands, region):
    """Prefetches what `_finish` reads and writes, which other cores may have written last."""
    N = operands.out.shape[1]
    for i in range(region.first, region.last):
        for place in range(i * N + region.left, i * N + region.right, LINE):
            prefetch_to_write(operands.out, place)
            if operands.activation.size > 0:
                prefetch_to_write(operands.activation, place)
            if operands.addend.size > 0:
                prefetch(operands.addend, place)


@jit
def _finish(operands, sums, place, sums_row, region):
    """Adds bias and addend to complete sums and stores them, then activation unless empty."""
    out, activation = operands.out, operands.activation
    bias, addend = operands.bias, operands.addend
    first, last, left, right = region
    N = out.shape[1]
    tail = (right - left) % LANES
    whole = right - tail
    for i in range(first, last):
        row = i * N
        for j in range(left, whole, LANES):
            y = load(sums, place + j - left)
            if bias.size > 0:
                y = y + load(bias, j)
            if addend.size > 0:
                y = y + load(addend, row + j)
            store(out, row + j, y)
            if activation.size > 0:
                # GELU of the rounded value, which is what the backward pass reads.
                store(activation, row + j, gelu_of(load(out, row + j)))
        if tail:
            y = load_first(sums, place + whole - left, tail)
            if bias.size > 0:
                y = y + load_first(bias, whole, tail)
            if addend.size > 0:
                y = y + load_first(addend, row + whole, tail)
            store_first(out, row + whole, y, tail)
            if activation.size > 0:
                rounded = load_first(out, row + whole, tail)
                store_first(activation, row + whole, gelu_of(rounded), tail)
        place += sums_row
