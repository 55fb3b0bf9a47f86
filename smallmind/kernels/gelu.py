"""GELU in its tanh form (Hendrycks & Gimpel 2016), and its derivative.

gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(z), z = 2 sqrt(2/pi) (x + ...):
the same function with one exponential and no cancellation for negative x, where tanh is near -1.
"""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.simd import (
    LANES,
    LOG2_E,
    broadcast,
    fma,
    load,
    load_first,
    load_up_to,
    share,
    sigmoid_base2,
    start_of_overlapping,
    store,
    store_first,
    store_up_to,
)
from smallmind.kernels.codegen.threads import threads

SLOPE = np.float32(2 * np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)


@jit
def _sigmoid(x):
    """The sigmoid(z(x)) of a Vector."""
    slope, cubic = LOG2_E * SLOPE, LOG2_E * SLOPE * CUBIC
    return sigmoid_base2(x * fma(x * x, broadcast(cubic), broadcast(slope)))


@jit
def gelu_of(x):
    """GELU of a Vector."""
    return x * _sigmoid(x)


@jit
def gelu_and_derivative_of(x):
    """GELU and its derivative of a Vector."""
    # forward: y = x s, s = sigmoid(z), z = SLOPE (x + CUBIC x^3)
    s = _sigmoid(x)
    y = x * s
    dz = fma(x * x, broadcast(np.float32(3) * SLOPE * CUBIC), broadcast(SLOPE))
    return y, fma(y * (np.float32(1) - s), dz, s)


def gelu(y, x):
    """x (R, C) -> y (R, C) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Writes y.

    In training, the product that computes x writes y as well: `matmul_gelu`.
    """
    _gelu(y, x, threads())


@parallel_jit
def _gelu(y, x, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        whole = last - last % LANES
        for place in range(first, whole, LANES):
            store(y, place, gelu_of(load(x, place)))
        if whole < last:
            store_first(y, whole, gelu_of(load_first(x, whole, last - whole)), last - whole)


def gelu_backward(dx, y, dy, x):
    """dy, x (R, C) -> dx (R, C) = dy gelu'(x), y (R, C) = gelu(x).

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    _gelu_backward(dx, y, dy, x, threads())


@parallel_jit
def _gelu_backward(dx, y, dy, x, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        outputs = start_of_overlapping(dx), start_of_overlapping(y)
        inputs = start_of_overlapping(dy), start_of_overlapping(x)
        _gelu_backward_part(*outputs, *inputs, first, last)


@jit
def _gelu_backward_part(dx, y, dy, x, first, last):
    whole = last - last % LANES
    # Counted in vectors: LLVM would unroll a loop with steps of LANES, and run out of registers.
    for i in range(first // LANES, whole // LANES):
        _gelu_backward_vector(dx, y, dy, x, i * LANES, LANES)
    if whole < last:
        _gelu_backward_vector(dx, y, dy, x, whole, last - whole)


@inline_jit
def _gelu_backward_vector(dx, y, dy, x, place, count):
    activation, derivative = gelu_and_derivative_of(load_up_to(x, place, count))
    gradient = load_up_to(dy, place, count)
    store_up_to(dx, place, gradient * derivative, count)
    store_up_to(y, place, activation, count)
