"""Matrix products in three variants, one micro-kernel: a b, a^T b and a b^T.

The result is cut into tiles that stay in registers (`tile.multiply_tile`). What differs between
the variants is only how memory is walked: a panel of b, DEPTH x PANEL, is packed so that a tile
reads it front to back; where a is transposed, a strip of it is packed too. A panel and a strip are
scratch of bounded size, so no transposed copy of a matrix ever exists.
"""

import threading

import numpy as np
from numba import prange

from smallmind.kernels.compilation import jit, parallel_jit, threads
from smallmind.kernels.gelu import gelu_of
from smallmind.kernels.simd import LANES, at, load, load_first, store, store_first, transpose_tile
from smallmind.kernels.tile import PANEL, TILE_ROWS, TILE_VECTORS, multiply_tile, null

DEPTH = 256  # a panel of DEPTH x PANEL and a strip of STRIP x DEPTH share the second-level cache
STRIP = TILE_ROWS * 64
PACK_FROM = 3 * TILE_ROWS  # with fewer rows a panel is not used often enough to be worth packing
# The blocks of a strip lie one line more than a round size apart: at 6 KB they would all fall into
# two sets of the first-level cache.
BLOCK = TILE_ROWS * DEPTH + 16
GROUP = 16  # rows of a that are packed tile after tile while they are in the first-level cache
SCRATCH = DEPTH * PANEL + STRIP // TILE_ROWS * BLOCK
PLAIN, TRANSPOSE_A, TRANSPOSE_B = 0, 1, 2

_NO_VECTOR = np.empty(0, np.float32)
_NO_MATRIX = np.empty((0, 0), np.float32)
_local = threading.local()


def _scratch(workers):
    """One row a worker, kept between calls; each Python thread has its own."""
    scratch = getattr(_local, "scratch", None)
    if scratch is None or len(scratch) < workers:
        scratch = _local.scratch = np.empty((workers, SCRATCH), np.float32)
    return scratch


def _or(given, otherwise):
    return otherwise if given is None else given


def matmul(out, a, b, bias=None, plus=None):
    """a (M, K), b (K, N) -> out (M, N) = a b [+ bias (N,)] [+ plus (M, N)]. Writes out."""
    _product(out, _NO_MATRIX, a, b, _or(bias, _NO_VECTOR), _or(plus, _NO_MATRIX), PLAIN)


def matmul_gelu(out, before, a, b, bias=None):
    """a (M, K), b (K, N) -> before (M, N) = a b [+ bias (N,)], out = gelu(before). Writes both."""
    _product(before, out, a, b, _or(bias, _NO_VECTOR), _NO_MATRIX, PLAIN)


def matmul_transpose_a(out, a, b, plus=None):
    """a (K, M), b (K, N) -> out (M, N) = a^T b [+ plus (M, N), which may be out]. Writes out."""
    _product(out, _NO_MATRIX, a, b, _NO_VECTOR, _or(plus, _NO_MATRIX), TRANSPOSE_A)


def matmul_transpose_b(out, a, b, plus=None):
    """a (M, K), b (N, K) -> out (M, N) = a b^T [+ plus (M, N), which may be out]. Writes out."""
    _product(out, _NO_MATRIX, a, b, _NO_VECTOR, _or(plus, _NO_MATRIX), TRANSPOSE_B)


def _product(out, activated, a, b, bias, plus, variant):
    workers = threads()
    _product_parallel(out, activated, a, b, bias, plus, variant, _scratch(workers), workers)


@parallel_jit
def _product_parallel(out, activated, a, b, bias, plus, variant, scratch, workers):
    for worker in prange(workers):
        _product_part(
            out, activated, a, b, bias, plus, variant, scratch[worker], np.int64(worker), workers
        )


@jit
def _product_part(out, activated, a, b, bias, plus, variant, scratch, worker, workers):
    """The worker's share: a range of row tiles, or of panels where there are few rows."""
    M, N = out.shape
    vectors = (N + LANES - 1) // LANES
    panels = (vectors + TILE_VECTORS - 1) // TILE_VECTORS
    tiles = (M + TILE_ROWS - 1) // TILE_ROWS
    # A worker packs what it does not share: it shares the side that is larger.
    by_columns = panels % workers == 0 and variant == TRANSPOSE_A and N > M
    if not by_columns and (tiles >= 8 * workers or tiles >= panels):
        first, last = (
            TILE_ROWS * (tiles * worker // workers),
            TILE_ROWS * (tiles * (worker + 1) // workers),
        )
        first_panel, last_panel = 0, panels
    else:
        first, last = 0, M
        first_panel, last_panel = panels * worker // workers, panels * (worker + 1) // workers
    for row in range(first, min(last, M), STRIP):
        _product_rows(
            out, activated, a, b, bias, plus, variant, scratch,
            (row, min(last, M, row + STRIP), first_panel, last_panel, panels),
        )  # fmt: skip


@jit
def _product_rows(out, activated, a, b, bias, plus, variant, scratch, part):
    """Rows first..last and some panels of the result, block after block along K."""
    first, last, first_panel, last_panel, panels = part
    N = out.shape[1]
    K = a.shape[0] if variant == TRANSPOSE_A else a.shape[1]
    vectors = (N + LANES - 1) // LANES
    packed = last - first >= PACK_FROM or variant == TRANSPOSE_B
    strip = DEPTH * PANEL
    for start in range(0, max(K, 1), DEPTH):
        depth = min(DEPTH, K - start)
        if variant == TRANSPOSE_A:
            _pack_strip(scratch, strip, a, start, depth, first, last)
        for panel in range(first_panel, last_panel):
            column = vectors * panel // panels * LANES
            end = min(N, vectors * (panel + 1) // panels * LANES)
            width = (end - column + LANES - 1) // LANES * LANES
            if variant == TRANSPOSE_B:
                _pack_transposed(scratch, b, start, depth, column, end, width)
            elif packed or column + width > N:
                _pack_panel(scratch, b, start, depth, column, end, width)
            for row in range(first, last, TILE_ROWS):
                rows = min(TILE_ROWS, last - row)
                if variant == TRANSPOSE_A:
                    block = strip + (row - first) // TILE_ROWS * BLOCK
                    a_tile, a_row, a_column = at(scratch, block), 1, TILE_ROWS
                else:
                    a_tile, a_row, a_column = at(a, row * K + start), K, 1
                if packed or column + width > N:
                    b_panel, b_row = at(scratch, 0), width
                else:
                    b_panel, b_row = at(b, start * N + column), N
                plus_tile, bias_tile = null(), null()
                if start > 0:
                    plus_tile = at(out, row * N + column)
                elif plus.size > 0:
                    plus_tile = at(plus, row * N + column)
                if start + depth == K and bias.size > 0:
                    bias_tile = at(bias, column)
                multiply_tile(
                    a_tile, a_row, a_column, b_panel, b_row, at(out, row * N + column), N,
                    depth, rows, end - column, plus_tile, N, bias_tile,
                )  # fmt: skip
                if start + depth == K and activated.size > 0:
                    _activate(activated, out, row, rows, column, end)


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


@jit
def _pack_panel(scratch, b, start, depth, column, end, width):
    """b[start:start + depth, column:end] -> scratch (depth, width), zeros from end on."""
    N = b.shape[1]
    tail = (end - column) % LANES
    for k in range(depth):
        source, target = (start + k) * N + column, k * width
        for j in range(0, end - column - tail, LANES):
            store(scratch, target + j, load(b, source + j))
        if tail:
            j = end - column - tail
            store(scratch, target + j, load_first(b, source + j, tail))


@jit
def _pack_transposed(scratch, b, start, depth, column, end, width):
    """b[column:end, start:start + depth]^T -> scratch (depth, width), zeros from end on."""
    K = b.shape[1]
    whole = depth - depth % LANES
    for j in range(column, column + width, LANES):
        target = j - column
        if j + LANES <= end:
            for k in range(0, whole, LANES):
                transpose_tile(at(b, j * K + start + k), K, at(scratch, k * width + target), width)
            for k in range(whole, depth):
                for lane in range(LANES):
                    scratch[k * width + target + lane] = b[j + lane, start + k]
        else:
            for k in range(depth):
                for lane in range(LANES):
                    inside = j + lane < end
                    scratch[k * width + target + lane] = (
                        b[j + lane, start + k] if inside else np.float32(0)
                    )


@jit
def _pack_strip(scratch, offset, a, start, depth, first, last):
    """a[start:start + depth, first:last] -> one block (depth, rows) for each tile of rows."""
    M = a.shape[1]
    for group in range(0, depth, GROUP):
        for row in range(first, last, TILE_ROWS):
            rows = min(TILE_ROWS, last - row)
            block = offset + (row - first) // TILE_ROWS * BLOCK
            for k in range(group, min(depth, group + GROUP)):
                source, target = (start + k) * M + row, block + k * TILE_ROWS
                for lane in range(0, TILE_ROWS, LANES):
                    # Whole vectors: what lies past the tile is overwritten by the next k.
                    if row + lane + LANES <= M:
                        store(scratch, target + lane, load(a, source + lane))
                    else:
                        count = max(0, min(LANES, rows - lane))
                        store(scratch, target + lane, load_first(a, source + lane, count))
