"""Softmax cross-entropy: the loss of each token, and the gradient of the logits in their place."""

import numpy as np
from numba import prange

from smallmind.kernels.compilation import jit, parallel_jit
from smallmind.kernels.reduce import CHUNK
from smallmind.kernels.simd import (
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


def cross_entropy(losses, logits, targets, scale):
    """logits (R, V), targets (R,) -> losses (R,) = log sum exp(logits) - logits[target], in nats.

    Writes losses; overwrites logits with their gradient, scale (softmax(logits) - onehot(target)),
    which for scale = 1/R is the gradient of the mean loss.
    """
    _cross_entropy(losses, logits, targets, np.float32(scale))


@parallel_jit
def _cross_entropy(losses, logits, targets, scale):
    R = logits.shape[0]
    for chunk in prange((R + CHUNK - 1) // CHUNK):
        _cross_entropy_rows(losses, logits, targets, scale, np.int64(chunk) * CHUNK)


@jit
def _cross_entropy_rows(losses, logits, targets, scale, first):
    R, V = logits.shape
    tail = V % LANES
    whole = V - tail
    for r in range(first, min(R, first + CHUNK)):
        row = r * V
        target_logit = logits[r, targets[r]]
        top = broadcast(target_logit)
        for v in range(0, whole, LANES):
            top = maximum(load(logits, row + v), top)
        if tail:
            top = maximum(first_or(load_first(logits, row + whole, tail), tail, top), top)
        m = lane_maximum(top)

        total = broadcast(np.float32(0))
        for v in range(0, whole, LANES):
            e = exp(load(logits, row + v) - m)
            total = total + e
            store(logits, row + v, e)
        if tail:
            e = keep_first(exp(load_first(logits, row + whole, tail) - m), tail)
            total = total + e
            store_first(logits, row + whole, e, tail)
        s = lane_sum(total)
        losses[r] = np.log(s) + (m - target_logit)

        # backward: d loss / d logit = softmax - onehot
        inverse = scale / s
        for v in range(0, whole, LANES):
            store(logits, row + v, load(logits, row + v) * inverse)
        if tail:
            store_first(logits, row + whole, load_first(logits, row + whole, tail) * inverse, tail)
        logits[r, targets[r]] -= scale
