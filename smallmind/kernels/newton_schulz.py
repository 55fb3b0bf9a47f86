"""The Newton-Schulz iteration of Muon, on the Gram matrix, for one matrix on one thread.

Five times, X becomes X p(X^T X) with p(G) = a + b G + c G^2. All five factors are polynomials of
the first G = X^T X, so they commute, and their product Q follows from G alone:

    P = p(G);  Q = Q P;  G = G P P

X, which has up to four times as many rows as G, is read only twice: for G, and for X Q. All the
other products are symmetric: their lower triangle is computed, and mirrored. A matrix with more
columns than rows is multiplied from the left, by p(X X^T).

The squares of singular values are less precise than the values: where these span a factor of 100
and more, the error is up to 5e-4 of the result in float32, instead of 5e-6. In bfloat16, in which
others iterate X itself, their error is 1e-2; squares are too coarse for it.
"""

from typing import Any, NamedTuple

import numpy as np

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.simd import LANES, at, broadcast, fma, load, store
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.blocked import PANEL_SIZE, SCRATCH, gemm_share
from smallmind.kernels.gemm.packing import MAX_DEPTH, PLAIN, pack_transposed
from smallmind.kernels.gemm.tile import (
    NULL,
    PANEL,
    TILE_ROWS,
    Extent,
    Rows,
    Strip,
    multiply_panel,
)
from smallmind.kernels.reference_optimizers import CUBIC, ITERATIONS, LINEAR, QUINTIC

PACKING = SCRATCH  # elements of Scratch.packing
_A, _B, _C = np.float32(LINEAR), np.float32(CUBIC), np.float32(QUINTIC)


class Scratch(NamedTuple):
    """The working memory of a thread for a matrix (M, N), of which R is the smaller size."""

    x: Any  # (M, N) the matrix, divided by its norm
    result: Any  # (M, N)
    gram: Any  # (R, R), like the next three
    factor: Any  # p(gram)
    product: Any  # of all factors so far
    spare: Any
    packing: Any  # of matrix products; vectors may read past the end of what is before it


@jit
def divided(own, M, N):
    """own (at least MatrixBlocks.scratch_size + PACKING,) -> Scratch for a matrix (M, N)."""
    R = min(M, N)
    size, square = M * N, R * R
    end = 2 * size + 4 * square
    squares = own[2 * size : end].reshape(4, R, R)
    return Scratch(
        own[:size].reshape(M, N),
        own[size : 2 * size].reshape(M, N),
        squares[0],
        squares[1],
        squares[2],
        squares[3],
        own[end:],
    )


@jit
def orthogonalise(_working, scratch):
    """newton_schulz(scratch.x), whose norm must be at most 1 -> scratch.result."""
    x, result, packing = scratch.x, scratch.result, scratch.packing
    gram, factor, product, spare = scratch.gram, scratch.factor, scratch.product, scratch.spare
    _write_gram(gram, x, packing)
    for i in range(ITERATIONS):
        _write_factor(factor, gram, packing)
        if i > 0:
            _multiply_symmetric(spare, product, factor, packing)
            product, spare = spare, product
        if i < ITERATIONS - 1:
            _multiply_symmetric(spare, gram, factor, packing)
            _multiply_symmetric(gram, spare, factor, packing)
        if i == 0:
            product, factor = factor, product
    left, right = (x, product) if x.shape[0] > x.shape[1] else (product, x)
    gemm_share(result, x[:0], left, right, packing[:0], x[:0], PLAIN, packing, 0, 1)
    return result


@jit
def _write_gram(gram, x, packing):
    """x (M, N) -> gram = x^T x or, if it is smaller, x x^T."""
    M, N = x.shape
    R, K = gram.shape[0], max(M, N)
    blocks = ceil_div(K, MAX_DEPTH)
    for left in range(0, R, PANEL):
        columns = min(PANEL, R - left)
        for i in range(blocks):
            start, end = i * K // blocks, (i + 1) * K // blocks
            if M > N:
                a = Strip(at(x, start * N + left), TILE_ROWS, 1, N)
                b = Rows(at(x, start * N + left), N)
                _multiply_triangle(gram, a, b, left, start, end, packing)
            else:
                pack_transposed(packing[:PANEL_SIZE], x, start, end, left, left + columns)
                a = Strip(at(x, left * N + start), TILE_ROWS * N, N, 1)
                b = Rows(at(packing, 0), round_up(columns, LANES))
                _multiply_rows(gram, a, b, left, start, end, NULL)
    _mirror(gram)


@jit
def _write_factor(factor, gram, packing):
    """gram (R, R) -> factor = a I + b gram + c gram^2."""
    R = gram.shape[0]
    _multiply_lower(factor, gram, gram, packing)
    for i in range(R):
        whole = (i + 1) // LANES * LANES
        for j in range(0, whole, LANES):
            k = i * R + j
            store(factor, k, fma(load(factor, k), broadcast(_C), load(gram, k) * _B))
        for j in range(whole, i + 1):
            factor[i, j] = _C * factor[i, j] + _B * gram[i, j]
        factor[i, i] += _A
    _mirror(factor)


@jit
def _multiply_symmetric(out, a, b, packing):
    """a, b (R, R), symmetric and commuting -> out = a b, which is symmetric."""
    _multiply_lower(out, a, b, packing)
    _mirror(out)


@jit
def _multiply_lower(out, a, b, packing):
    """a, b (R, R) -> the lower triangle of out = a b, and some elements above it."""
    R = out.shape[0]
    blocks = ceil_div(R, MAX_DEPTH)
    for left in range(0, R, PANEL):
        for i in range(blocks):
            start, end = i * R // blocks, (i + 1) * R // blocks
            strip = Strip(at(a, left * R + start), TILE_ROWS * R, R, 1)
            rows = Rows(at(b, start * R + left), R)
            _multiply_triangle(out, strip, rows, left, start, end, packing)


@jit
def _multiply_triangle(out, a, b, left, start, end, packing):
    """Multiplies as _multiply_rows does; packs b if it is read again."""
    R = out.shape[0]
    is_packed = R - left > TILE_ROWS and (left + PANEL <= R or R % LANES == 0)
    _multiply_rows(out, a, b, left, start, end, at(packing, 0) if is_packed else NULL)


@jit
def _multiply_rows(out, a, b, left, start, end, packed):
    """Adds a b to the rows of out from `left` on, in a panel of columns from `left` on.

    a and b begin there, and at start of K; where start is 0, it writes instead of adding.
    """
    R = out.shape[0]
    place = at(out, left * R + left)
    extent = Extent(R - left, min(PANEL, R - left), end - start)
    before = place if start > 0 else NULL
    multiply_panel(Rows(place, R), a, b, extent, Rows(before, R), NULL, packed)


@jit
def _mirror(x):
    """Copies the lower triangle of x (R, R) to the upper one."""
    R = x.shape[0]
    whole = R // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(0, i, LANES):
            transpose_tile(at(x, i * R + j), R, at(x, j * R + i), R)
        for row in range(i, i + LANES):
            for column in range(i, row):
                x[column, row] = x[row, column]
    for i in range(whole, R):
        for j in range(i):
            x[j, i] = x[i, j]
