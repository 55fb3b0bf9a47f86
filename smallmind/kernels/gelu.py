"""GELU in its tanh form (Hendrycks & Gimpel 2016), and its derivative.

gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(z), z = 2 sqrt(2/pi) (x + ...):
the same function with one exponential and no cancellation for negative x, where tanh is near -1.
"""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    fma,
    load_up_to,
    share,
    sigmoid,
    store_up_to,
)
from smallmind.kernels.codegen.threads import threads

SLOPE = np.float32(2 * np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)


@jit
def _sigmoid(x):
    """sigmoid(z(x)) of a Vector."""
    return sigmoid(x * fma(x * x, broadcast(SLOPE * CUBIC), broadcast(SLOPE)))


@jit
def gelu_of(x):
    """gelu of a Vector."""
    return x * _sigmoid(x)


@jit
def gelu_and_derivative_of(x):
    """gelu and gelu' of a Vector."""
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
        for place in range(first, last, LANES):
            count = min(LANES, last - place)
            store_up_to(y, place, gelu_of(load_up_to(x, place, count)), count)


def gelu_backward(dx, y, dy, x):
    """dy, x (R, C) -> dx (R, C) = dy gelu'(x), y (R, C) = gelu(x).

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    _gelu_backward(dx, y, dy, x, threads())


@parallel_jit
def _gelu_backward(dx, y, dy, x, workers):
    for worker in prange(workers):
        _gelu_backward_part(dx, y, dy, x, np.int64(worker), workers)


@jit
def _gelu_backward_part(dx, y, dy, x, worker, workers):
    first, last = share(x.size, worker, workers)
    for place in range(first, last, LANES):
        count = min(LANES, last - place)
        activation, derivative = gelu_and_derivative_of(load_up_to(x, place, count))
        gradient = load_up_to(dy, place, count)
        store_up_to(dx, place, gradient * derivative, count)
        store_up_to(y, place, activation, count)
