"""AdamW (Loshchilov & Hutter 2019) with clipping and clearing, in one pass over the vectors."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit, serial_jit
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    fma,
    load_up_to,
    maximum,
    minimum,
    share,
    square_root,
    store_up_to,
)
from smallmind.kernels.reference_optimizers import AdamWCoefficients

MAX_ALONE_ELEMENTS = 16384  # elements up to which one thread is faster than waking others

_NO_VECTOR = np.empty(0, np.float32)


def adamw(parameters, gradients, m, v, decayed, coefficients, working=None):
    working = _NO_VECTOR if working is None else working
    # Always float64: any other type of number would compile another specialisation.
    coefficients = AdamWCoefficients(*map(float, coefficients))
    if parameters.size <= MAX_ALONE_ELEMENTS:
        _adamw_alone(parameters, gradients, m, v, decayed, coefficients, working)
    else:
        _adamw(parameters, gradients, m, v, decayed, coefficients, working)


@serial_jit
def _adamw_alone(parameters, gradients, m, v, decayed, coefficients, working):
    size = parameters.size
    _adamw_part(parameters, gradients, m, v, working, 0, decayed, True, coefficients)
    _adamw_part(parameters, gradients, m, v, working, decayed, size, False, coefficients)


@parallel_jit
def _adamw(parameters, gradients, m, v, decayed, coefficients, working, workers):
    for worker in prange(workers):
        first, last = share(parameters.size, np.int64(worker), workers)
        split = min(max(decayed, first), last)
        _adamw_part(parameters, gradients, m, v, working, first, split, True, coefficients)
        _adamw_part(parameters, gradients, m, v, working, split, last, False, coefficients)


@jit
def _adamw_part(parameters, gradients, m, v, working, first, last, decays, coefficients):
    c = coefficients
    rate, epsilon = np.float32(c.learning_rate), np.float32(c.epsilon)
    beta1, beta2 = broadcast(np.float32(c.beta1)), broadcast(np.float32(c.beta2))
    # 1 - beta is rounded once, from the float64: beta itself may round to 1.
    rest1, rest2 = np.float32(1 - c.beta1), np.float32(1 - c.beta2)
    correction1, correction2 = np.float32(c.correction1), np.float32(c.correction2)
    scale, limit = np.float32(c.gradient_scale), np.float32(c.max_gradient)
    max_gradient, min_gradient = broadcast(limit), broadcast(-limit)
    shrinkage = rate * np.float32(c.weight_decay) if decays else np.float32(0)
    keep = broadcast(np.float32(1) - shrinkage)
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        p, g = load_up_to(parameters, i, count), load_up_to(gradients, i, count)
        mi, vi = load_up_to(m, i, count), load_up_to(v, i, count)
        g = minimum(max_gradient, maximum(min_gradient, g * scale))
        mi = fma(mi, beta1, g * rest1)
        vi = fma(vi, beta2, g * g * rest2)
        step = mi * (rate * correction1) / (square_root(vi * correction2) + epsilon)
        p = p * keep - step
        store_up_to(parameters, i, p, count)
        store_up_to(m, i, mi, count)
        store_up_to(v, i, vi, count)
        store_up_to(gradients, i, broadcast(np.float32(0)), count)
        if working.size > 0:
            store_up_to(working, i, p, count)
