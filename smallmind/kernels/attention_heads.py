"""What both passes of attention share: where heads lie in the arrays, and how they are packed."""

from typing import Any, NamedTuple

import numpy as np

from smallmind.kernels.codegen.jit import called_jit, inline_jit, jit
from smallmind.kernels.codegen.rounding import round_up
from smallmind.kernels.codegen.simd import LANES, at, element, load, load_first, store, store_first
from smallmind.kernels.codegen.transpose import transpose_tile
from smallmind.kernels.gemm.tile import NULL, PANEL, TILE_ROWS, Rows, multiply_panel

ROWS = 8 * TILE_ROWS  # queries whose probabilities the backward pass holds at once
_ONE_DOCUMENT = np.zeros((1, 1), np.int32)  # all queries see the first key


class Shape(NamedTuple):
    """The sizes of an attention: H heads of queries in G groups, each with its keys and values."""

    B: int
    T: int
    H: int
    G: int
    D: int
    has_documents: bool


def attention_shape(qkv, out, logsumexp, firsts):
    """qkv (B T, (H + 2 G) D), out (B T, H D), logsumexp (B, H, T) -> their sizes.

    And whether there are firsts (B, T).
    """
    B, H, T = logsumexp.shape
    D = out.shape[1] // H
    return Shape(B, T, H, (qkv.shape[1] // D - H) // 2, D, firsts is not None)


def first_keys(firsts):
    """firsts (B, T) or None -> an array in any case: kernels are compiled for one type only."""
    return _ONE_DOCUMENT if firsts is None else firsts


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
    firsts: Any  # a pointer to the first key that each query sees
    firsts_step: int  # between those of two queries; 0: the same for all


@jit
def row_of_share(T, share):
    """The row at a share of T, moved to the nearest block boundary of the backward pass."""
    return T if share >= 1 else min(T, np.int64(share * T + ROWS / 2) // ROWS * ROWS)


@jit
def head_at(index, shape, firsts):
    """The head with this number, counted over the queries of all sequences.

    firsts is a pointer to the array.
    """
    T, H, G, D = shape.T, shape.H, shape.G, shape.D
    b, h = index // H, index % H
    width, C, group = (H + 2 * G) * D, H * D, h // (H // G)
    row = b * T * width
    keys = row + C + group * D
    step = 1 if shape.has_documents else 0
    return Head(
        T,
        D,
        width,
        C,
        row + h * D,
        keys,
        keys + G * D,
        b * T * C + h * D,
        index * T,
        at(firsts, b * T * step),
        step,
    )


@inline_jit
def first_key(head, query):
    """The first key that a query sees. It never decreases from one query to the next."""
    return np.int64(head.firsts[query * head.firsts_step])


@inline_jit
def first_column(head, query):
    """The first column of scores that a tile of queries, from this one on, needs.

    It begins a vector, at the latest that of the first key's tile: the backward pass multiplies
    whole tiles of keys.
    """
    if head.firsts_step == 0:
        return np.int64(0)
    return first_key(head, query) // TILE_ROWS * TILE_ROWS // LANES * LANES


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
