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
    load,
    load_first,
    sigmoid,
    store,
    store_first,
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
    vectors = x.size // LANES
    for i in range(vectors * worker // workers, vectors * (worker + 1) // workers):
        place = i * LANES
        activated, derivative = gelu_and_derivative_of(load(x, place))
        gradient = load(dy, place)
        store(dx, place, gradient * derivative)
        store(y, place, activated)
    tail = x.size % LANES
    if tail and worker == workers - 1:
        place = vectors * LANES
        activated, derivative = gelu_and_derivative_of(load_first(x, place, tail))
        gradient = load_first(dy, place, tail)
        store_first(dx, place, gradient * derivative, tail)
        store_first(y, place, activated, tail)
