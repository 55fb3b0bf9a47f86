"""Soft capping of logits (Gemma Team 2024): values stay within +-cap, and its backward pass."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    load_up_to,
    share,
    sigmoid,
    start_of_overlapping,
    store_up_to,
)
from smallmind.kernels.codegen.threads import threads


def softcap(y, x, cap):
    """x (R, V) -> y (R, V) = cap tanh(x / cap). Writes y, which may be x."""
    _softcap(y, x, np.float32(cap), threads())


@parallel_jit
def _softcap(y, x, cap, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        _softcap_part(start_of_overlapping(y), start_of_overlapping(x), cap, first, last)


@jit
def _softcap_part(y, x, cap, first, last):
    double, one = broadcast(np.float32(2)), broadcast(np.float32(1))
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        # tanh(z) = 2 sigmoid(2 z) - 1
        tanh = double * sigmoid(load_up_to(x, i, count) * (np.float32(2) / cap)) - one
        store_up_to(y, i, tanh * cap, count)


def softcap_backward(dx, dy, y, cap):
    """dy, y (R, V) -> dx (R, V) = dy (1 - (y / cap)^2). Writes dx, which may be dy."""
    _softcap_backward(dx, dy, y, np.float32(cap), threads())


@parallel_jit
def _softcap_backward(dx, dy, y, cap, workers):
    for worker in prange(workers):
        first, last = share(y.size, np.int64(worker), workers)
        gradients = start_of_overlapping(dx), start_of_overlapping(dy)
        _softcap_backward_part(*gradients, y, cap, first, last)


@jit
def _softcap_backward_part(dx, dy, y, cap, first, last):
    one = broadcast(np.float32(1))
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        tanh = load_up_to(y, i, count) * (np.float32(1) / cap)
        store_up_to(dx, i, load_up_to(dy, i, count) * (one - tanh * tanh), count)
