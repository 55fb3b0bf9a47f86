"""SwiGLU (Shazeer 2020): a sigmoid-weighted gate times a linear half, and its backward pass."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.codegen.simd import (
    LANES,
    LOG2_E,
    broadcast,
    fma,
    load_up_to,
    sigmoid_base2,
    start_of_overlapping,
    store_up_to,
)
from smallmind.kernels.codegen.threads import threads


def swiglu(y, x):
    """x (R, 2 W), the gate and what it multiplies -> y (R, W) = silu(gate) up. Writes y.

    silu(z) = z sigmoid(z).
    """
    _swiglu(y, x, threads())


@parallel_jit
def _swiglu(y, x, workers):
    R, W = y.shape
    for worker in prange(workers):
        first, last = row_share(R, np.int64(worker), workers)
        for r in range(first, last):
            _swiglu_row(y, x, r, W)


@jit
def _swiglu_row(y, x, r, W):
    whole = W - W % LANES
    for c in range(0, whole, LANES):
        _swiglu_vector(y, x, r, W, c, LANES)
    if whole < W:
        _swiglu_vector(y, x, r, W, whole, W - whole)


@inline_jit
def _swiglu_vector(y, x, r, W, c, count):
    gate = load_up_to(x, 2 * r * W + c, count)
    up = load_up_to(x, 2 * r * W + W + c, count)
    store_up_to(y, r * W + c, gate * sigmoid_base2(gate * LOG2_E) * up, count)


def swiglu_backward(dx, y, dy, x):
    """dy (R, W), x (R, 2 W) -> dx (R, 2 W), y (R, W) = swiglu(x).

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    _swiglu_backward(dx, y, dy, x, threads())


@parallel_jit
def _swiglu_backward(dx, y, dy, x, workers):
    R, W = y.shape
    for worker in prange(workers):
        first, last = row_share(R, np.int64(worker), workers)
        outputs = start_of_overlapping(dx), start_of_overlapping(y)
        inputs = start_of_overlapping(dy), start_of_overlapping(x)
        for r in range(first, last):
            _swiglu_backward_row(*outputs, *inputs, r, W)


@jit
def _swiglu_backward_row(dx, y, dy, x, r, W):
    whole = W - W % LANES
    for i in range(whole // LANES):
        _swiglu_backward_vector(dx, y, dy, x, r, W, i * LANES, LANES)
    if whole < W:
        _swiglu_backward_vector(dx, y, dy, x, r, W, whole, W - whole)


@inline_jit
def _swiglu_backward_vector(dx, y, dy, x, r, W, c, count):
    # forward: y = silu(gate) up, silu(z) = z s, s = sigmoid(z)
    gate = load_up_to(x, 2 * r * W + c, count)
    up = load_up_to(x, 2 * r * W + W + c, count)
    d = load_up_to(dy, r * W + c, count)
    s = sigmoid_base2(gate * LOG2_E)
    silu = gate * s
    # silu' = s + z s (1 - s)
    slope = fma(silu, broadcast(np.float32(1)) - s, s)
    store_up_to(dx, 2 * r * W + c, d * up * slope, count)
    store_up_to(dx, 2 * r * W + W + c, d * silu, count)
    store_up_to(y, r * W + c, silu * up, count)
