"""Divides a matrix product among workers, and packs its operands.

The threads divide the result by a grid. A thread processes its part in strips of rows and panels of
columns, and K in blocks; the matching parts of a and b are packed so that a tile reads them
sequentially. Operands may be stored in 16 bits; packed they are float32.
"""

from typing import Any, NamedTuple

import numpy as np

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import (
    LANES,
    NARROW,
    at,
    copy_narrow,
    element,
    load,
    load_first,
    prefetch,
    store,
)
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.tile import FETCHED_AHEAD, LINE, PANEL, TILE_ROWS, TILE_VECTORS

MAX_DEPTH = 512  # maximum depth along K that is multiplied at a time
MAX_STRIP_ROWS = TILE_ROWS * 64  # maximum number of rows of the result at a time
PACKING_ROWS = 12  # measured: see grid_rows
PLAIN, TRANSPOSE_A, TRANSPOSE_B = 0, 1, 2  # the products a b, a^T b and a b^T
# Added to a variant: a row has the same bits whatever the number of rows; a product a b^T has those
# of a b.
BY_ROWS, AS_PLAIN = 4, 8


class PackedPanel(NamedTuple):
    """A panel of b as tiles read it."""

    rows: Any
    packed: Any  # pointer to where the first tile writes what it reads, or NULL


class Region(NamedTuple):
    """Rows first..last and columns left..right of a matrix."""

    first: int
    last: int
    left: int
    right: int


@jit
def grid_rows(M, vectors, workers, variant, height):
    """-> the number of bands of rows of the grid of workers that gives the busiest the least work.

    Rows are multiplied `height` at a time. A row and a vector cost 1 for each k. To read a vector
    of b for the first time, from memory or from another core's cache, and to pack it costs as much
    as PACKING_ROWS rows, twice that if it is transposed; to read a row of a, as much as one vector.
    """
    min_cost, best = np.int64(1) << 62, 1
    packing = 2 * PACKING_ROWS if variant == TRANSPOSE_B else PACKING_ROWS
    tiles = ceil_div(M, height)
    for bands in range(1, workers + 1):
        busiest = np.int64(0)
        # The workers in a band: some bands may have one more, and are higher.
        for across in range(workers // bands, ceil_div(workers, bands) + 1):
            rows = ceil_div(tiles * across, workers) * height
            cost = (rows + packing) * ceil_div(vectors, across) + rows
            busiest = max(busiest, cost)
        if busiest < min_cost:
            min_cost, best = busiest, bands
    return best


@jit
def grid_region(M, vectors, workers, worker, variant, height):
    """Returns the part of a result of M rows that a worker owns, in a grid that balances the work.

    The grid has bands of rows, each as high as its number of workers, who divide its columns among
    them: no worker is left over, however many there are. Its rows are whole tiles of `height`; its
    columns are whole vectors, and the last may end beyond the matrix.
    """
    bands = grid_rows(M, vectors, workers, variant, height)
    band = ((worker + 1) * bands - 1) // workers
    begin, end = workers * band // bands, workers * (band + 1) // bands
    tiles, across, place = ceil_div(M, height), end - begin, worker - begin
    return Region(
        min(M, tiles * begin // workers * height),
        min(M, tiles * end // workers * height),
        vectors * place // across * LANES,
        vectors * (place + 1) // across * LANES,
    )


@jit
def panel_start(left, right, panel):
    """Returns the first column of a panel; the widths of panels differ by at most one vector."""
    vectors, panels = ceil_div(right - left, LANES), ceil_div(right - left, PANEL)
    return min(right, left + vectors * panel // panels * LANES)


@jit
def padded_row(size):
    """Elements between rows of `size` elements in scratch: mostly an odd number of cache lines.

    With a power of two the rows of a tile would compete for few sets of the cache.
    """
    return round_up(size, 16) + 16


@jit
def packed_tile(depth):
    """Elements between packed tiles of a: an odd number of cache lines.

    With a power of two the tiles would compete for few sets of the cache.
    """
    return (depth * TILE_ROWS // 32 * 2 + 3) * 16


@jit
def pack_columns(strip, a, start, end, first, last):
    """a[start:end, first:last] -> strip, TILE_ROWS columns at a time.

    Vectors are stored whole: the excess is overwritten by the next row, or never read.
    """
    M = a.shape[1]
    size, tiles = packed_tile(end - start), ceil_div(last - first, TILE_ROWS)
    # At least this many tiles can be read in whole vectors.
    whole = max(0, min(tiles, (M - first - round_up(TILE_ROWS, LANES)) // TILE_ROWS + 1))
    for k in range(start, end):
        source, target = k * M + first, (k - start) * TILE_ROWS
        for column in range(0, last - first, LINE):
            prefetch(a, source + FETCHED_AHEAD * M + column)
        for _ in range(whole):
            for v in range(0, TILE_ROWS, NARROW):
                copy_narrow(strip, target + v, a, source + v)
            source, target = source + TILE_ROWS, target + size
        for tile in range(whole, tiles):
            for v in range(0, TILE_ROWS, LANES):
                n = max(0, min(LANES, M - first - tile * TILE_ROWS - v))
                store(strip, target + v, load_first(a, source + v, n))
            source, target = source + TILE_ROWS, target + size


@jit
def copy_rows(out, out_row, x, source, rows, columns):
    """rows x columns of x, from flat index `source` on -> out, with zeros up to whole vectors.

    out_row: elements between rows of out.
    """
    target, x_row = 0, x.shape[1]
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
def pack_transposed(panel, b, start, end, column, last):
    """b[column:last, start:end]^T -> panel (end - start, whole vectors), zeros from `last` on."""
    K = b.shape[1]
    depth, width = end - start, round_up(last - column, LANES)
    whole = depth - depth % LANES
    for j in range(column, column + width, LANES):
        target = j - column
        if j + LANES <= last:
            for k in range(0, whole, LANES):
                transpose_tile(at(b, j * K + start + k), K, at(panel, k * width + target), width)
            for k in range(whole, depth):
                for lane in range(LANES):
                    panel[k * width + target + lane] = element(b, (j + lane) * K + start + k)
        else:
            for k in range(depth):
                for lane in range(LANES):
                    panel[k * width + target + lane] = (
                        element(b, (j + lane) * K + start + k) if j + lane < last else np.float32(0)
                    )
