"""How a matrix product is cut up, and its operands packed.

The threads share the result as a grid. A thread goes through its part in strips of rows and panels
of columns, and through K in blocks; what of a and b belongs to these is packed so that a tile reads
it front to back. Operands may be stored in 16 bits; packed they are float32.
"""

import numpy as np

from smallmind.kernels.compilation import jit
from smallmind.kernels.simd import (
    LANES,
    at,
    element,
    load,
    load_first,
    prefetch,
    round_up,
    store,
    transpose_tile,
)
from smallmind.kernels.tile import PANEL, TILE_ROWS, TILE_VECTORS

DEPTH = 512  # most of K that is multiplied in one go
STRIP = TILE_ROWS * 64  # most rows of the result at a time
PLAIN, TRANSPOSE_A, TRANSPOSE_B = 0, 1, 2  # the products a b, a^T b and a b^T


@jit
def pieces(n, size):
    """How many pieces of at most `size` n is cut into."""
    return (n + size - 1) // size


@jit
def grid_rows(M, vectors, workers, variant):
    """The rows of a grid of workers over the result, in which the busiest has the least to do."""
    best, down = np.int64(1) << 62, 1
    for rows in range(1, workers + 1):
        high, wide = pieces(M, rows), pieces(vectors, workers // rows)
        # A step along K of a row and a vector costs 1; packing b for it adds 3, or 9 where it is
        # transposed.
        cost = (high + (9 if variant == TRANSPOSE_B else 3)) * wide
        if cost < best:
            best, down = cost, rows
    return down


@jit
def panel_start(left, right, panel):
    """The first column of a panel; the panels of a range differ by one vector at most."""
    vectors, panels = pieces(right - left, LANES), pieces(right - left, PANEL)
    return min(right, left + vectors * panel // panels * LANES)


@jit
def packed_tile(depth):
    """Elements from a packed tile of a to the next: an odd number of cache lines.

    At a round distance the tiles would fall into few sets of the cache.
    """
    return (depth * TILE_ROWS // 32 * 2 + 3) * 16


@jit
def pack_columns(scratch, place, a, start, end, first, last):
    """a[start:end, first:last] -> scratch from `place` on, TILE_ROWS columns at a time.

    Vectors are stored whole: what is too much of one the next row overwrites, or nobody reads.
    """
    M = a.shape[1]
    size, tiles = packed_tile(end - start), pieces(last - first, TILE_ROWS)
    # So many tiles at least can be read in whole vectors.
    whole = max(0, min(tiles, (M - first - round_up(TILE_ROWS, LANES)) // TILE_ROWS + 1))
    for k in range(start, end):
        source, target = k * M + first, place + (k - start) * TILE_ROWS
        for _ in range(whole):
            prefetch(a, source + 2 * M)
            for v in range(0, TILE_ROWS, LANES):
                store(scratch, target + v, load(a, source + v))
            source, target = source + TILE_ROWS, target + size
        for tile in range(whole, tiles):
            for v in range(0, TILE_ROWS, LANES):
                n = max(0, min(LANES, M - first - tile * TILE_ROWS - v))
                store(scratch, target + v, load_first(a, source + v, n))
            source, target = source + TILE_ROWS, target + size


@jit
def copy_rows(out, target, out_row, x, source, x_row, rows, columns):
    """rows x columns of x from `source` on -> out from `target` on; zeros up to whole vectors."""
    if columns == PANEL:
        for _ in range(rows):
            for j in range(TILE_VECTORS):
                store(out, target + j * LANES, load(x, source + j * LANES))
            source, target = source + x_row, target + out_row
    else:
        whole = columns // LANES
        tail = columns - whole * LANES
        for _ in range(rows):
            for j in range(whole):
                store(out, target + j * LANES, load(x, source + j * LANES))
            if tail:
                place = whole * LANES
                store(out, target + place, load_first(x, source + place, tail))
            source, target = source + x_row, target + out_row


@jit
def pack_transposed(scratch, b, start, depth, column, end, width):
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
                    scratch[k * width + target + lane] = element(b, (j + lane) * K + start + k)
        else:
            for k in range(depth):
                for lane in range(LANES):
                    inside = j + lane < end
                    scratch[k * width + target + lane] = (
                        element(b, (j + lane) * K + start + k) if inside else np.float32(0)
                    )
