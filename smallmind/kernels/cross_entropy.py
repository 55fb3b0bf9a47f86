"""Softmax cross-entropy: the loss of each token, and the gradient of the logits."""

from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    exp,
    first_or,
    keep_first,
    lane_maximum,
    lane_sum,
    load,
    load_first,
    maximum,
    store,
    store_first,
)


class Weights(NamedTuple):
    """The weight of each row: `values[r * step]`."""

    values: np.ndarray
    step: int  # 0: all rows have the same


_ONE = np.ones(1, np.float32)


def row_weights(weights):
    """weights (R,) or None, for rows that all count the same -> Weights."""
    return Weights(_ONE, 0) if weights is None else Weights(weights, 1)


def cross_entropy(losses, dlogits, logits, targets, scale, weights=None):
    scale, weights = np.asarray(scale, np.float32), row_weights(weights)
    _cross_entropy(losses, dlogits, logits, targets, scale, weights)


@parallel_jit
def _cross_entropy(losses, dlogits, logits, targets, scale, weights, workers):
    factor = scale[()]
    for worker in prange(workers):
        first, last = row_share(logits.shape[0], np.int64(worker), workers)
        _cross_entropy_rows(losses, dlogits, logits, targets, factor, weights, first, last)


@jit
def _cross_entropy_rows(losses, dlogits, logits, targets, scale, weights, first, last):
    """Computes some rows. A row's maximum, sum and gradient depend on each other in turn, so
    three successive rows are interleaved."""
    m, s = np.float32(0), np.float32(1)
    for r in range(first, last + 2):
        inverse, s_before = scale / s, s
        if first < r <= last:
            target_logit = logits[r - 1, targets[r - 1]]
            s = _exponentials(logits, r - 1, m)
            losses[r - 1] = row_weight(weights, r - 1) * (np.log(s) + (m - target_logit))
        if r < last:
            m = row_maximum(logits, r, targets[r])
        if r >= first + 2:
            # backward: d loss / d logit = softmax - onehot
            logits[r - 2, targets[r - 2]] -= s_before
            scale_row(dlogits, logits, r - 2, inverse * row_weight(weights, r - 2))


@inline_jit
def row_weight(weights, r):
    """Returns the weight of row r."""
    return weights.values[r * weights.step]


@jit
def row_maximum(logits, r, target):
    """Returns the maximum of row r, or its element at target if that is NaN."""
    V = logits.shape[1]
    row, tail = r * V, V % LANES
    whole = V - tail
    top = broadcast(logits[r, target])
    for v in range(0, whole, LANES):
        top = maximum(load(logits, row + v), top)
    if tail:
        top = maximum(first_or(load_first(logits, row + whole, tail), tail, top), top)
    return lane_maximum(top)


@jit
def _exponentials(logits, r, m):
    """Row r -> exp(row - m), in place; returns their sum."""
    V = logits.shape[1]
    row, tail = r * V, V % LANES
    whole = V - tail
    total = broadcast(np.float32(0))
    for v in range(0, whole, LANES):
        e = exp(load(logits, row + v) - m)
        total = total + e
        store(logits, row + v, e)
    if tail:
        e = keep_first(exp(load_first(logits, row + whole, tail) - m), tail)
        total = total + e
        store_first(logits, row + whole, e, tail)
    return lane_sum(total)


@jit
def scale_row(out, x, r, factor):
    """Row r of x times factor -> row r of out."""
    V = x.shape[1]
    row = r * V
    whole = V - V % LANES
    for v in range(0, whole, LANES):
        store(out, row + v, load(x, row + v) * factor)
    if whole < V:
        tail = V - whole
        store_first(out, row + whole, load_first(x, row + whole, tail) * factor, tail)
