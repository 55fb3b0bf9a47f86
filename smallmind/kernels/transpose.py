"""The transpose of a matrix whose numbers are moved as they are, whatever they mean."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div
from smallmind.kernels.codegen.simd import at
from smallmind.kernels.codegen.transpose import TILE, move_tile

BLOCK = 4 * TILE  # rows and columns whose cache lines are used up before they are left


def transpose(out, x, first=0):
    """Moves numbers of 16 or of 32 bits."""
    bits = np.int16 if x.itemsize == 2 else np.int32
    _transpose(out.view(bits), x.view(bits), first)


@parallel_jit
def _transpose(out, x, first):
    # A block of columns of x belongs to one thread, and with it whole rows of out.
    for block in prange(ceil_div(x.shape[1], BLOCK)):
        begin = np.int64(block) * BLOCK
        _transpose_columns(out, x, first, begin, min(begin + BLOCK, x.shape[1]))


@jit
def _transpose_columns(out, x, first, begin, end):
    """Columns begin..end of x -> rows of out, `first` columns from its left."""
    (R, C), W = x.shape, out.shape[1]
    whole_rows, whole_columns = R - R % TILE, end - (end - begin) % TILE
    for block in range(0, whole_rows, BLOCK):
        for c in range(begin, whole_columns, TILE):
            for r in range(block, min(block + BLOCK, whole_rows), TILE):
                move_tile(at(out, c * W + first + r), W, at(x, r * C + c), C)
    for c in range(begin, end):
        for r in range(whole_rows if c < whole_columns else 0, R):
            out[c, first + r] = x[r, c]
