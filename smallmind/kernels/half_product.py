"""Products of matrices that are stored in 16 bits, and calculated in float32.

Both operands are converted as they are packed: of a a strip, of b a panel. Where the CPU has a dot
product of bfloat16 they are not converted but packed in pairs. Sums along K stay in float32 until
they are complete; a result that is stored in 16 bits is rounded once.
"""

import numpy as np
from numba import prange, types
from numba.extending import overload

from smallmind.kernels.compilation import jit, parallel_jit, threads
from smallmind.kernels.gelu import gelu_of
from smallmind.kernels.isa import ISA
from smallmind.kernels.panels import (
    DEPTH,
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
    load,
    load_first,
    round_up,
    store,
    store_first,
)
from smallmind.kernels.tile import PANEL, TILE_ROWS, multiply_panel, null

if ISA.pairs:
    from smallmind.kernels.pairs import (
        multiply_pairs,
        pack_word_columns,
        pack_word_rows,
        pack_words,
        pack_words_transposed,
        words,
    )

STRIP_SIZE = 64 * 1024  # elements of a that are packed at a time: they stay in the second cache
SUMS_SIZE = 64 * 1024  # sums of a strip that are not complete yet
SCRATCH = DEPTH * PANEL + STRIP_SIZE + SUMS_SIZE


def half_product(out, activated, a, b, bias, plus, variant):
    """a, b of 16 bits -> out, and activated = gelu(out) if it is not empty; see `matmul`.

    bias and activated are of 16 bits too, out and plus of 16 or float32.
    """
    rows = scratch(threads(), SCRATCH)
    _half_product(out, activated, a, b, bias, plus, variant, rows)


@parallel_jit
def _half_product(out, activated, a, b, bias, plus, variant, scratch):
    workers = scratch.shape[0]
    for worker in prange(workers):
        _share(
            out, activated, a, b, bias, plus, variant, scratch[worker], np.int64(worker), workers
        )


@jit
def _share(out, activated, a, b, bias, plus, variant, scratch, worker, workers):
    """The worker's part of a grid over the result: strip after strip."""
    M, N = out.shape
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    vectors = pieces(N, LANES)
    down = grid_rows(M, vectors, workers, variant)
    across = workers // down
    i, j = worker // across, worker % across
    if i >= down:
        return
    first, last = M * i // down, M * (i + 1) // down
    left = vectors * j // across * LANES
    right = min(N, vectors * (j + 1) // across * LANES)
    blocks = max(1, pieces(K, DEPTH))
    depth = pieces(K, blocks)
    most = min(STRIP, STRIP_SIZE // _strip_row(_elements(a, depth) + 16) // TILE_ROWS * TILE_ROWS)
    # Even strips: b is packed for each of them, be it of few rows.
    strip = round_up(pieces(last - first, pieces(last - first, most)), TILE_ROWS)
    # Sums that are complete after one block need room for one panel only.
    width = right - left if blocks == 1 else (SUMS_SIZE // strip - 16) // LANES * LANES
    for row in range(first, last, strip):
        for column in range(left, right, max(1, width)):
            part = (row, min(last, row + strip), column, min(right, column + width))
            _rectangle(out, activated, a, b, bias, plus, variant, scratch, part, blocks, K)


@jit
def _strip_row(depth):
    """Elements from a packed row of a to the next: an odd number of cache lines, most of the time.

    At a round distance the rows of a tile would fall into few sets of the cache.
    """
    return round_up(depth, 16) + 16


def _elements(a, depth):
    """How many elements of scratch a row of a takes that is packed."""


def _pack_a(scratch, place, a, variant, start, end, first, last):
    """What of a makes rows first..last, K start..end -> `place` on, in scratch.

    Returns a pointer to it; the elements from a tile, a row and a column to the next; the depth.
    """


def _pack_b(scratch, b, variant, start, end, column, last):
    """What of b makes K start..end, columns column..last -> scratch (depth, whole vectors)."""


def _multiply(a, *operands):
    """The micro-kernel for what is packed of a."""


def _is_paired(array):
    return ISA.pairs and array.dtype == types.int16


@overload(_elements)
def _elements_of(a, depth):
    def converted(a, depth):
        return depth

    def paired(a, depth):
        return pieces(depth, 2)

    return paired if _is_paired(a) else converted


@overload(_pack_a)
def _pack_a_of(scratch, place, a, variant, start, end, first, last):
    def converted(scratch, place, a, variant, start, end, first, last):
        depth = end - start
        if variant == TRANSPOSE_A:
            pack_columns(scratch, place, a, start, end, first, last)
            return at(scratch, place), packed_tile(depth), 1, TILE_ROWS, depth
        row = _strip_row(depth)
        copy_rows(
            scratch, place, row, a, first * a.shape[1] + start, a.shape[1], last - first, depth
        )
        return at(scratch, place), TILE_ROWS * row, row, 1, depth

    def paired(scratch, place, a, variant, start, end, first, last):
        depth = pieces(end - start, 2)
        if variant == TRANSPOSE_A:
            pack_word_columns(scratch, place, a, start, end, first, last)
            return at(scratch, place), packed_tile(depth), 1, TILE_ROWS, depth
        K = a.shape[1]
        if K % 2 == 0:  # it consists of words
            return words(a, first * K + start), TILE_ROWS * (K // 2), K // 2, 1, depth
        row = _strip_row(depth)
        pack_words(scratch, place, row, a, start, end, first, last)
        return at(scratch, place), TILE_ROWS * row, row, 1, depth

    return paired if _is_paired(a) else converted


@overload(_pack_b)
def _pack_b_of(scratch, b, variant, start, end, column, last):
    def converted(scratch, b, variant, start, end, column, last):
        width = round_up(last - column, LANES)
        if variant == TRANSPOSE_B:
            pack_transposed(scratch, b, start, end - start, column, last, width)
        else:
            N = b.shape[1]
            copy_rows(scratch, 0, width, b, start * N + column, N, end - start, last - column)

    def paired(scratch, b, variant, start, end, column, last):
        width = round_up(last - column, LANES)
        if variant == TRANSPOSE_B:
            pack_words_transposed(scratch, b, start, end, column, last, width)
        else:
            pack_word_rows(scratch, b, start, end, column, last, width)

    return paired if _is_paired(b) else converted


@overload(_multiply)
def _multiply_of(a, *operands):
    def converted(a, *operands):
        multiply_panel(*operands)

    def paired(a, *operands):
        multiply_pairs(*operands)

    return paired if _is_paired(a) else converted


@jit
def _rectangle(out, activated, a, b, bias, plus, variant, scratch, part, blocks, K):
    """Rows first..last, columns left..right of the result, block after block along K."""
    first, last, left, right = part
    rows = last - first
    strip_place = DEPTH * PANEL
    sums_place = strip_place + STRIP_SIZE
    sums_row = PANEL if blocks == 1 else _strip_row(right - left)
    for block in range(blocks):
        # Even, so that pairs of numbers stay together.
        start = block * K // blocks // 2 * 2
        end = K if block == blocks - 1 else (block + 1) * K // blocks // 2 * 2
        strip = _pack_a(scratch, strip_place, a, variant, start, end, first, last)
        a_strip, a_tile, a_row, a_column, depth = strip
        for panel in range(pieces(right - left, PANEL)):
            column = panel_start(left, right, panel)
            last_column = panel_start(left, right, panel + 1)
            b_row = round_up(last_column - column, LANES)
            _pack_b(scratch, b, variant, start, end, column, last_column)
            sums = sums_place + (0 if blocks == 1 else column - left)
            _multiply(
                a, a_strip, a_tile, a_row, a_column, at(scratch, 0), b_row,
                at(scratch, sums), sums_row, depth, rows, b_row,
                null() if block == 0 else at(scratch, sums), sums_row, null(), null(),
            )  # fmt: skip
            if block == blocks - 1:
                _finish(
                    out, activated, scratch, sums, sums_row, bias, plus,
                    (first, last, column, last_column),
                )  # fmt: skip


@jit
def _finish(out, activated, sums, place, sums_row, bias, plus, part):
    """Adds bias and plus to complete sums, and stores them; then their GELU, where it is asked."""
    first, last, left, right = part
    N = out.shape[1]
    tail = (right - left) % LANES
    whole = right - tail
    for i in range(first, last):
        row = i * N
        for j in range(left, whole, LANES):
            y = load(sums, place + j - left)
            if bias.size > 0:
                y = y + load(bias, j)
            if plus.size > 0:
                y = y + load(plus, row + j)
            store(out, row + j, y)
            if activated.size > 0:
                # Of the rounded value: the backward pass has no other.
                store(activated, row + j, gelu_of(load(out, row + j)))
        if tail:
            y = load_first(sums, place + whole - left, tail)
            if bias.size > 0:
                y = y + load_first(bias, whole, tail)
            if plus.size > 0:
                y = y + load_first(plus, row + whole, tail)
            store_first(out, row + whole, y, tail)
            if activated.size > 0:
                rounded = load_first(out, row + whole, tail)
                store_first(activated, row + whole, gelu_of(rounded), tail)
        place += sums_row
