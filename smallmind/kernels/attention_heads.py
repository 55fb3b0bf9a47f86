"""What both passes of attention share: where heads lie in the arrays, and how they are packed."""

from typing import NamedTuple

import numpy as np

from smallmind.kernels.codegen.jit import called_jit, jit
from smallmind.kernels.codegen.rounding import round_up
from smallmind.kernels.codegen.simd import LANES, at, element, load, load_first, store, store_first
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.tile import NULL, PANEL, TILE_ROWS, Rows, multiply_panel

ROWS = 8 * TILE_ROWS  # queries whose probabilities the backward pass holds at once


class Shape(NamedTuple):
    """The sizes of an attention: H heads of queries in G groups, each with its keys and values."""

    B: int
    T: int
    H: int
    G: int
    D: int


def attention_shape(qkv, out, logsumexp):
    """qkv (B T, (H + 2 G) D), out (B T, H D), logsumexp (B, H, T) -> their sizes."""
    B, H, T = logsumexp.shape
    D = out.shape[1] // H
    return Shape(B, T, H, (qkv.shape[1] // D - H) // 2, D)


class Head(NamedTuple):
    """One head of one sequence, and where it begins in the arrays. All indices are flat."""

    T: int
    D: int
    width: int  # of qkv
    C: int  # of out
    queries: int  # in qkv (B T, width), as the two below
    keys: int
    values: int
    out: int  # in out (B T, C)
    logsumexp: int  # in logsumexp (B, H, T)


@jit
def row_of_share(T, share):
    """The row at a share of T, moved to the nearest block boundary of the backward pass."""
    return T if share >= 1 else min(T, np.int64(share * T + ROWS / 2) // ROWS * ROWS)


@jit
def head_at(index, shape):
    """The head with this number, counted over the queries of all sequences."""
    T, H, G, D = shape.T, shape.H, shape.G, shape.D
    b, h = index // H, index % H
    width, C, group = (H + 2 * G) * D, H * D, h // (H // G)
    row = b * T * width
    keys = row + C + group * D
    return Head(T, D, width, C, row + h * D, keys, keys + G * D, b * T * C + h * D, index * T)


@called_jit
def panel_elements(T, D):
    """Elements of the keys or values of a head, in panels."""
    return round_up(T, PANEL) * D


@called_jit
def row_elements(T, D):
    """Elements of the queries, keys or values of a head, in padded rows."""
    return T * round_up(D, LANES)


@called_jit
def score_row(T):
    """Elements between rows of scores: a power of two would use only few sets of the cache."""
    return round_up(T, PANEL) + 16


@jit
def multiply(c, a, b, extent):
    """c = a b: `multiply_panel` with nothing to add and nothing to pack."""
    multiply_panel(c, a, b, extent, Rows(NULL, 0), NULL, NULL)


@jit
def write_row(out, place, x, source, count, factor):
    """`count` elements of x from source on, times factor -> out from place on."""
    whole = count // LANES * LANES
    for c in range(0, whole, LANES):
        store(out, place + c, load(x, source + c) * factor)
    if count > whole:
        store_first(out, place + whole, load(x, source + whole) * factor, count - whole)


@jit
def pack_columns(panels, x, place, stride, T, D):
    """T rows of D elements -> their transpose as panels (D, PANEL); zeros in the columns past T."""
    for t in range(0, round_up(T, LANES), LANES):
        panel, column = t // PANEL * PANEL * D, t % PANEL
        whole = D - D % LANES if t + LANES <= T else 0
        for d in range(0, whole, LANES):
            transpose_tile(
                at(x, place + t * stride + d), stride, at(panels, panel + d * PANEL + column), PANEL
            )
        for d in range(whole, D):
            for lane in range(LANES):
                inside = t + lane < T
                panels[panel + d * PANEL + column + lane] = (
                    element(x, place + (t + lane) * stride + d) if inside else np.float32(0)
                )


@jit
def pack_rows(rows, x, place, stride, T, D):
    """T rows of D elements -> the same, contiguous, each padded with zeros to whole vectors."""
    D_row = round_up(D, LANES)
    for t in range(T):
        for d in range(0, D, LANES):
            count = min(LANES, D - d)
            store(rows, t * D_row + d, load_first(x, place + t * stride + d, count))
