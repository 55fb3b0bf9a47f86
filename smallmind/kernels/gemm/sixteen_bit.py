"""Products of matrices that are stored in 16 bits and multiplied in float32.

Both operands are converted as they are packed, a strip of a and a panel of b at a time. If the CPU
has a dot product of bfloat16, they are packed in pairs instead of converted. Sums along K stay in
float32 until they are complete; a result that is stored in 16 bits is rounded once.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import LANES, at, borrow, load, load_first, store, store_first
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.gelu import gelu_of
from smallmind.kernels.gemm.blocked import Operands
from smallmind.kernels.gemm.packing import (
    DEPTH,
    STRIP,
    TRANSPOSE_A,
    TRANSPOSE_B,
    Region,
    copy_rows,
    grid_rows,
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
)

if ISA.pairs:
    from smallmind.kernels.gemm.bfloat16_pairs import (
        multiply_pairs,
        pack_word_columns,
        pack_word_rows,
        pack_words,
        pack_words_transposed,
        words,
    )

# Scratch of a thread: a packed panel of b, a packed strip of a, which stays in the second-level
# cache, and the incomplete sums of a strip.
PANEL_SIZE = DEPTH * PANEL
STRIP_SIZE = 64 * 1024
SUMS_SIZE = 64 * 1024
SCRATCH = PANEL_SIZE + STRIP_SIZE + SUMS_SIZE


class Packed(NamedTuple):
    """The scratch of a thread."""

    panel: Any
    strip: Any
    sums: Any


def sixteen_bit_gemm(out, activation, a, b, bias, addend, variant):
    """a, b in 16 bits -> out, and activation = gelu(out) unless it is empty; see `Operands`.

    bias and activation are in 16 bits too, out and addend in 16 or 32.
    """
    rows = scratch(threads(), SCRATCH)
    _sixteen_bit_gemm(out, activation, a, b, bias, addend, variant, rows)


@parallel_jit
def _sixteen_bit_gemm(out, activation, a, b, bias, addend, variant, scratch):
    workers = scratch.shape[0]
    for worker in prange(workers):
        own = borrow(scratch[worker])
        packed = Packed(
            own[:PANEL_SIZE],
            own[PANEL_SIZE : PANEL_SIZE + STRIP_SIZE],
            own[PANEL_SIZE + STRIP_SIZE :],
        )
        operands = Operands(
            borrow(out),
            borrow(activation),
            borrow(a),
            borrow(b),
            borrow(bias),
            borrow(addend),
            variant,
        )
        _share(operands, packed, np.int64(worker), workers)


@jit
def _share(operands, packed, worker, workers):
    """The worker's part of the result, strip after strip."""
    a, variant = operands.a, operands.variant
    M, N = operands.out.shape
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    vectors = ceil_div(N, LANES)
    down = grid_rows(M, vectors, workers, variant)
    across = workers // down
    i, j = worker // across, worker % across
    if i >= down:
        return
    first, last = M * i // down, M * (i + 1) // down
    left = vectors * j // across * LANES
    right = min(N, vectors * (j + 1) // across * LANES)
    blocks = max(1, ceil_div(K, DEPTH))
    row_size = _padded_row(_packed_depth(a, ceil_div(K, blocks)) + 16)
    max_height = min(STRIP, STRIP_SIZE // row_size // TILE_ROWS * TILE_ROWS)
    # Strips of equal height: b is packed for each of them, however few rows it has.
    height = round_up(ceil_div(last - first, ceil_div(last - first, max_height)), TILE_ROWS)
    # Sums that are complete after one block need the space of one panel only.
    width = right - left if blocks == 1 else (SUMS_SIZE // height - 16) // LANES * LANES
    for row in range(first, last, height):
        for column in range(left, right, max(1, width)):
            region = Region(row, min(last, row + height), column, min(right, column + width))
            _gemm_region(operands, packed, region, blocks)


@jit
def _padded_row(size):
    """Elements between rows of `size` elements in scratch: mostly an odd number of cache lines.

    With a power of two the rows of a tile would compete for few sets of the cache.
    """
    return round_up(size, 16) + 16


def _packed_depth(a, depth):
    """The number of float32 or words that `depth` elements of a row become when packed."""


def _pack_a(strip, a, variant, start, end, first, last):
    """Packs rows first..last, K start..end of the left operand -> Strip, of scratch or of a."""


def _pack_b(panel, b, variant, start, end, left, right):
    """Packs K start..end, columns left..right of the right operand -> (depth, whole vectors)."""


def _multiply(a, *operands):
    """`multiply_panel` for what is packed of a."""


def _is_paired(array):
    return ISA.pairs and array.dtype == types.int16


@overload(_packed_depth)
def _packed_depth_of(a, depth):
    def converted(a, depth):
        return depth

    def paired(a, depth):
        return ceil_div(depth, 2)

    return paired if _is_paired(a) else converted


@overload(_pack_a)
def _pack_a_of(strip, a, variant, start, end, first, last):
    def converted(strip, a, variant, start, end, first, last):
        depth = end - start
        if variant == TRANSPOSE_A:
            pack_columns(strip, a, start, end, first, last)
            return Strip(at(strip, 0), packed_tile(depth), 1, TILE_ROWS)
        row = _padded_row(depth)
        copy_rows(strip, row, a, first * a.shape[1] + start, last - first, depth)
        return Strip(at(strip, 0), TILE_ROWS * row, row, 1)

    def paired(strip, a, variant, start, end, first, last):
        depth = ceil_div(end - start, 2)
        if variant == TRANSPOSE_A:
            pack_word_columns(strip, a, start, end, first, last)
            return Strip(at(strip, 0), packed_tile(depth), 1, TILE_ROWS)
        K = a.shape[1]
        if K % 2 == 0:  # the rows of a consist of words
            return Strip(words(a, first * K + start), TILE_ROWS * (K // 2), K // 2, 1)
        row = _padded_row(depth)
        pack_words(strip, row, a, start, end, first, last)
        return Strip(at(strip, 0), TILE_ROWS * row, row, 1)

    return paired if _is_paired(a) else converted


@overload(_pack_b)
def _pack_b_of(panel, b, variant, start, end, left, right):
    def converted(panel, b, variant, start, end, left, right):
        if variant == TRANSPOSE_B:
            pack_transposed(panel, b, start, end, left, right)
        else:
            source = start * b.shape[1] + left
            copy_rows(panel, round_up(right - left, LANES), b, source, end - start, right - left)

    def paired(panel, b, variant, start, end, left, right):
        if variant == TRANSPOSE_B:
            pack_words_transposed(panel, b, start, end, left, right)
        else:
            pack_word_rows(panel, b, start, end, left, right)

    return paired if _is_paired(b) else converted


@overload(_multiply)
def _multiply_of(a, *operands):
    def converted(a, *operands):
        multiply_panel(*operands)

    def paired(a, *operands):
        multiply_pairs(*operands)

    return paired if _is_paired(a) else converted


@jit
def _gemm_region(operands, packed, region, blocks):
    """A region of the result, block after block along K, panel after panel."""
    a, b, variant = operands.a, operands.b, operands.variant
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    first, last, left, right = region
    sums_row = PANEL if blocks == 1 else _padded_row(right - left)
    for block in range(blocks):
        # Even, so that pairs stay together.
        start = block * K // blocks // 2 * 2
        end = K if block == blocks - 1 else (block + 1) * K // blocks // 2 * 2
        strip = _pack_a(packed.strip, a, variant, start, end, first, last)
        for panel in range(ceil_div(right - left, PANEL)):
            column = panel_start(left, right, panel)
            last_column = panel_start(left, right, panel + 1)
            width = round_up(last_column - column, LANES)
            _pack_b(packed.panel, b, variant, start, end, column, last_column)
            place = 0 if blocks == 1 else column - left
            sums = Rows(at(packed.sums, place), sums_row)
            addend = sums if block > 0 else Rows(NULL, 0)
            extent = Extent(last - first, width, _packed_depth(a, end - start))
            _multiply(a, sums, strip, Rows(at(packed.panel, 0), width), extent, addend, NULL, NULL)
            if block == blocks - 1:
                part = Region(first, last, column, last_column)
                _finish(operands, packed.sums, place, sums_row, part)


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
