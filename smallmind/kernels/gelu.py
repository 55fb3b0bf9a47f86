"""GELU of a Vector, for products and for kernels of single elements.

In its tanh form it is x sigmoid(z), z = 2 sqrt(2/pi) (x + 0.044715 x^3): the same function with
one exponential and no cancellation for negative x, where tanh is near -1.
"""

import numpy as np

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.simd import LOG2_E, broadcast, fma, sigmoid_base2

SLOPE = np.float32(2 * np.sqrt(2 / np.pi))
CUBIC = np.float32(0.044715)


@jit
def _gelu_sigmoid(x):
    """Returns the sigmoid(z(x)) of a Vector."""
    slope, cubic = LOG2_E * SLOPE, LOG2_E * SLOPE * CUBIC
    return sigmoid_base2(x * fma(x * x, broadcast(cubic), broadcast(slope)))


@jit
def gelu_of(x):
    """-> the GELU of a Vector."""
    return x * _gelu_sigmoid(x)


@jit
def gelu_and_derivative_of(x):
    """-> the GELU and its derivative of a Vector."""
    # forward: y = x s, s = sigmoid(z), z = SLOPE (x + CUBIC x^3)
    s = _gelu_sigmoid(x)
    y = x * s
    dz = fma(x * x, broadcast(np.float32(3) * SLOPE * CUBIC), broadcast(SLOPE))
    return y, fma(y * (np.float32(1) - s), dz, s)
