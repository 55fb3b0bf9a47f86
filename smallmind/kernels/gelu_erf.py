"""GELU in its exact form (Hendrycks & Gimpel 2016), x Phi(x), and its derivative.

Phi(-|x|) = exp(-x^2 / 2) q(t), t = 1 / (1 + 0.31 |x|): q is a polynomial fitted to the rest, within
2e-7 relative, so that nothing cancels in the tail, and the derivative has the same exponential.
"""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.simd import (
    LANES,
    LOG2_E,
    broadcast,
    exp2_normal,
    fma,
    load_up_to,
    maximum,
    share,
    start_of_overlapping,
    store_up_to,
    zero_below,
)

DENSITY = np.float32(1 / np.sqrt(2 * np.pi))  # of the normal distribution at 0


@jit
def _phi_and_exponential(x):
    """Returns Phi(x), the normal distribution function of a Vector, and exp(-x^2 / 2)."""
    one = broadcast(np.float32(1))
    size = maximum(x, np.float32(0) - x)
    t = one / fma(size, broadcast(np.float32(0.31)), one)
    q = broadcast(np.float32(0.03588922928699737))
    q = fma(q, t, broadcast(np.float32(-0.14181362944094184)))
    q = fma(q, t, broadcast(np.float32(0.15544997098645164)))
    q = fma(q, t, broadcast(np.float32(-0.015278182988320593)))
    q = fma(q, t, broadcast(np.float32(0.11032234637182552)))
    q = fma(q, t, broadcast(np.float32(0.10770201738816898)))
    q = fma(q, t, broadcast(np.float32(0.12407225672484476)))
    q = fma(q, t, broadcast(np.float32(0.12365607342023367)))
    power = x * x * (LOG2_E * np.float32(-0.5))
    # Zero, so that the derivative at infinity is NaN on every CPU.
    exponential = zero_below(exp2_normal(power), power, broadcast(np.float32(-126)))
    tail = exponential * (q * t)
    return zero_below(one - tail - tail, x, broadcast(np.float32(0))) + tail, exponential


@parallel_jit
def gelu_erf(y, x, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        for place in range(first, last, LANES):
            _gelu_erf_vector(y, x, place, min(LANES, last - place))


@inline_jit
def _gelu_erf_vector(y, x, place, count):
    value = load_up_to(x, place, count)
    phi, _ = _phi_and_exponential(value)
    store_up_to(y, place, value * phi, count)


@parallel_jit
def gelu_erf_backward(dx, y, dy, x, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        outputs = start_of_overlapping(dx), start_of_overlapping(y)
        inputs = start_of_overlapping(dy), start_of_overlapping(x)
        _gelu_erf_backward_part(*outputs, *inputs, first, last)


@jit
def _gelu_erf_backward_part(dx, y, dy, x, first, last):
    whole = last - last % LANES
    for i in range(first // LANES, whole // LANES):
        _gelu_erf_backward_vector(dx, y, dy, x, i * LANES, LANES)
    if whole < last:
        _gelu_erf_backward_vector(dx, y, dy, x, whole, last - whole)


@inline_jit
def _gelu_erf_backward_vector(dx, y, dy, x, place, count):
    # forward: y = x Phi(x), Phi' = exp(-x^2 / 2) / sqrt(2 pi)
    value, gradient = load_up_to(x, place, count), load_up_to(dy, place, count)
    phi, exponential = _phi_and_exponential(value)
    store_up_to(dx, place, gradient * fma(value * DENSITY, exponential, phi), count)
    store_up_to(y, place, value * phi, count)
