"""A gated GELU, in its tanh form, and its derivative; rows are a gate and what it multiplies."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.codegen.simd import LANES, load_up_to, start_of_overlapping, store_up_to
from smallmind.kernels.gelu import gelu_and_derivative_of, gelu_of


@parallel_jit
def geglu(y, x, workers):
    R, W = y.shape
    for worker in prange(workers):
        first, last = row_share(R, np.int64(worker), workers)
        for r in range(first, last):
            _geglu_row(y, x, r, W)


@jit
def _geglu_row(y, x, r, W):
    whole = W - W % LANES
    for c in range(0, whole, LANES):
        _geglu_vector(y, x, r, W, c, LANES)
    if whole < W:
        _geglu_vector(y, x, r, W, whole, W - whole)


@inline_jit
def _geglu_vector(y, x, r, W, c, count):
    gate = load_up_to(x, 2 * r * W + c, count)
    up = load_up_to(x, 2 * r * W + W + c, count)
    store_up_to(y, r * W + c, gelu_of(gate) * up, count)


@parallel_jit
def geglu_backward(dx, y, dy, x, workers):
    R, W = y.shape
    for worker in prange(workers):
        first, last = row_share(R, np.int64(worker), workers)
        outputs = start_of_overlapping(dx), start_of_overlapping(y)
        inputs = start_of_overlapping(dy), start_of_overlapping(x)
        for r in range(first, last):
            _geglu_backward_row(*outputs, *inputs, r, W)


@jit
def _geglu_backward_row(dx, y, dy, x, r, W):
    whole = W - W % LANES
    for i in range(whole // LANES):
        _geglu_backward_vector(dx, y, dy, x, r, W, i * LANES, LANES)
    if whole < W:
        _geglu_backward_vector(dx, y, dy, x, r, W, whole, W - whole)


@inline_jit
def _geglu_backward_vector(dx, y, dy, x, r, W, c, count):
    # forward: y = gelu(gate) up
    gate = load_up_to(x, 2 * r * W + c, count)
    up = load_up_to(x, 2 * r * W + W + c, count)
    d = load_up_to(dy, r * W + c, count)
    activation, derivative = gelu_and_derivative_of(gate)
    store_up_to(dx, 2 * r * W + c, d * up * derivative, count)
    store_up_to(dx, 2 * r * W + W + c, d * activation, count)
    store_up_to(y, r * W + c, activation * up, count)
