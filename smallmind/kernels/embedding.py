"""Embeddings of tokens and positions, and the scatter of their gradients."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div
from smallmind.kernels.codegen.simd import (
    LANES,
    load,
    load_first,
    load_up_to,
    start_of_overlapping,
    store,
    store_first,
    store_up_to,
)
from smallmind.kernels.reduce import CHUNK

_NO_MATRIX = np.empty((0, 0), np.float32)


def embedding(out, token_weight, position_weight, ids, start=0):
    """ids (B, T), token_weight (V, C), position_weight (P, C) -> out (B T, C). Writes out.

    out[b, t] = token_weight[ids[b, t]] + position_weight[start + t].
    """
    _embedding(out, token_weight, position_weight, ids, start)


@parallel_jit
def _embedding(out, token_weight, position_weight, ids, start):
    R = out.shape[0]
    for chunk in prange(ceil_div(R, CHUNK)):
        _embedding_rows(out, token_weight, position_weight, ids, start, np.int64(chunk) * CHUNK)


@jit
def _embedding_rows(out, token_weight, position_weight, ids, start, first):
    R, C = out.shape
    T, tail = ids.shape[1], C % LANES
    b, t = first // T, first % T
    for r in range(first, min(R, first + CHUNK)):
        token, position = np.int64(ids[b, t]) * C, (start + t) * C
        t += 1
        if t == T:
            b, t = b + 1, 0
        for c in range(0, C - tail, LANES):
            total = load(token_weight, token + c) + load(position_weight, position + c)
            store(out, r * C + c, total)
        if tail:
            c = C - tail
            total = load_first(token_weight, token + c, tail)
            total = total + load_first(position_weight, position + c, tail)
            store_first(out, r * C + c, total, tail)


@parallel_jit
def embedding_backward(dtoken_weight, dposition_weight, dout, ids):
    """dout (B T, C), ids (B, T) -> adds to dtoken_weight (V, C) and dposition_weight (P, C).

    Each iteration owns a range of channels and visits all rows, so equal ids never collide.
    """
    C = dout.shape[1]
    for group in prange(ceil_div(C, LANES)):
        _embedding_backward_channels(
            dtoken_weight, dposition_weight, dout, ids, np.int64(group) * LANES
        )


@jit
def _embedding_backward_channels(dtoken_weight, dposition_weight, dout, ids, c):
    # forward: out[b, t] = token_weight[ids[b, t]] + position_weight[t]
    B, T = ids.shape
    C = dout.shape[1]
    count = min(LANES, C - c)
    for b in range(B):
        for t in range(T):
            token, position = np.int64(ids[b, t]) * C + c, t * C + c
            d = load_up_to(dout, (b * T + t) * C + c, count)
            total = load_up_to(dtoken_weight, token, count) + d
            store_up_to(dtoken_weight, token, total, count)
            total = load_up_to(dposition_weight, position, count) + d
            store_up_to(dposition_weight, position, total, count)


def lookup(out, weight, ids, addend=None):
    """ids (B, T), weight (V, C) -> out (B T, C) = weight[ids] [+ addend (B T, C), may be out]."""
    _lookup(out, weight, ids, _NO_MATRIX if addend is None else addend)


@parallel_jit
def _lookup(out, weight, ids, addend):
    for chunk in prange(ceil_div(out.shape[0], CHUNK)):
        pointers = start_of_overlapping(out), start_of_overlapping(addend)
        first = np.int64(chunk) * CHUNK
        _lookup_rows(*pointers, addend.size > 0, weight, ids, first, out.shape)


@jit
def _lookup_rows(out, addend, adds, weight, ids, first, shape):
    (R, C), T = shape, ids.shape[1]
    for r in range(first, min(R, first + CHUNK)):
        row = np.int64(ids[r // T, r % T]) * C
        for c in range(0, C, LANES):
            count = min(LANES, C - c)
            value = load_up_to(weight, row + c, count)
            if adds:
                value = value + load_up_to(addend, r * C + c, count)
            store_up_to(out, r * C + c, value, count)


@parallel_jit
def lookup_backward(dweight, dout, ids):
    """dout (B T, C), ids (B, T) -> adds to dweight (V, C).

    Each iteration owns a range of channels, as in embedding_backward.
    """
    C = dout.shape[1]
    for group in prange(ceil_div(C, LANES)):
        _lookup_backward_channels(dweight, dout, ids, np.int64(group) * LANES)


@jit
def _lookup_backward_channels(dweight, dout, ids, c):
    # forward: out = weight[ids]
    B, T = ids.shape
    C = dout.shape[1]
    count = min(LANES, C - c)
    for b in range(B):
        for t in range(T):
            row = np.int64(ids[b, t]) * C + c
            total = load_up_to(dweight, row, count)
            total = total + load_up_to(dout, (b * T + t) * C + c, count)
            store_up_to(dweight, row, total, count)
