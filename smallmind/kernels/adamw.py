"""AdamW (Loshchilov & Hutter 2019) with clipping and clearing, in one pass over the vectors."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    fma,
    load,
    load_first,
    maximum,
    minimum,
    square_root,
    store,
    store_first,
)
from smallmind.kernels.codegen.threads import threads

_NO_VECTOR = np.empty(0, np.float32)


def adamw(parameters, gradients, m, v, decayed, coefficients, working=None):
    """One update of parameters (n,) by gradients (n,) and moments m, v (n,). Writes all four.

    g = gradient_scale * gradients, each number clipped to +-most
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    p = p (1 - learning_rate weight_decay)
        - learning_rate m correction1 / (sqrt(v correction2) + epsilon)
    Only the first `decayed` parameters decay. gradients end as zeros. working (n,), where it is
    given, becomes a copy of the parameters, rounded to its dtype. coefficients:
    reference.AdamWCoefficients.
    """
    c = coefficients
    # 1 - beta is rounded once, from the float64: beta itself may round to 1.
    numbers = (c.learning_rate, c.beta1, 1 - c.beta1, c.beta2, 1 - c.beta2, c.epsilon)
    factors = (c.weight_decay, c.correction1, c.correction2, c.gradient_scale, c.most)
    packed = np.array(numbers + factors, np.float32)
    working = _NO_VECTOR if working is None else working
    _adamw(parameters, gradients, m, v, decayed, packed, working, threads())


@parallel_jit
def _adamw(parameters, gradients, m, v, decayed, coefficients, working, workers):
    for worker in prange(workers):
        vectors = ceil_div(parameters.size, LANES)
        first = vectors * worker // workers * LANES
        last = min(parameters.size, vectors * (worker + 1) // workers * LANES)
        split = min(max(decayed, first), last)
        rate, decay = coefficients[0], coefficients[6]
        for begin, end, shrinkage in ((first, split, rate * decay), (split, last, np.float32(0))):
            _adamw_part(parameters, gradients, m, v, working, begin, end, shrinkage, coefficients)


@jit
def _adamw_part(parameters, gradients, m, v, working, first, last, shrinkage, coefficients):
    rate, beta1, rest1, beta2, rest2 = (
        coefficients[0], coefficients[1], coefficients[2], coefficients[3], coefficients[4],
    )  # fmt: skip
    epsilon, correction1, correction2, scale = (
        coefficients[5], coefficients[7], coefficients[8], coefficients[9],
    )  # fmt: skip
    most, least = broadcast(coefficients[10]), broadcast(-coefficients[10])
    keep = broadcast(np.float32(1) - shrinkage)
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        if count == LANES:
            p, g, mi, vi = load(parameters, i), load(gradients, i), load(m, i), load(v, i)
        else:
            p, g = load_first(parameters, i, count), load_first(gradients, i, count)
            mi, vi = load_first(m, i, count), load_first(v, i, count)
        g = minimum(most, maximum(least, g * scale))
        mi = fma(mi, broadcast(beta1), g * rest1)
        vi = fma(vi, broadcast(beta2), g * g * rest2)
        step = mi * (rate * correction1) / (square_root(vi * correction2) + epsilon)
        p = p * keep - step
        if count == LANES:
            store(parameters, i, p)
            store(m, i, mi)
            store(v, i, vi)
            store(gradients, i, broadcast(np.float32(0)))
            if working.size > 0:
                store(working, i, p)
        else:
            store_first(parameters, i, p, count)
            store_first(m, i, mi, count)
            store_first(v, i, vi, count)
            store_first(gradients, i, broadcast(np.float32(0)), count)
            if working.size > 0:
                store_first(working, i, p, count)
