"""Muon (Jordan et al. 2024): momentum, orthogonalised and subtracted, matrix by matrix."""

import math

import numpy as np
from numba import prange, types

from smallmind.kernels import newton_schulz
from smallmind.kernels.codegen.choice import choice
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    add_squares,
    broadcast,
    fma,
    load_up_to,
    maximum,
    minimum,
    no_doubles,
    share,
    store_up_to,
    sum_of_doubles,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.newton_schulz import divided
from smallmind.kernels.reference_optimizers import MIN_NORM, MuonCoefficients

PACKING = newton_schulz.PACKING  # elements of scratch besides those for matrices
if ISA.matrix_unit:
    from smallmind.kernels import newton_schulz_bfloat16

    PACKING = max(PACKING, newton_schulz_bfloat16.PACKING)
_NO_VECTOR = np.empty(0, np.float32)


def muon(parameters, gradients, m, blocks, coefficients, working=None):
    """Iterates in float32, or in bfloat16 if working is and the CPU has a matrix unit."""
    working = _NO_VECTOR if working is None else working
    coefficients = MuonCoefficients(*map(float, coefficients))
    own = scratch(threads(), blocks.scratch_size + PACKING)
    _muon(parameters, gradients, m, working, blocks, coefficients, own)


@parallel_jit
def _muon(parameters, gradients, m, working, blocks, coefficients, scratch):
    workers = scratch.shape[0]
    for worker in prange(workers):
        own = scratch[worker]
        for i in range(blocks.starts.size):
            # Back and forth: equal work, if the blocks are sorted by size.
            turn, place = i // workers, i % workers
            if worker == (place if turn % 2 == 0 else workers - 1 - place):
                _update(parameters, gradients, m, working, blocks, i, coefficients, own)


@jit
def _update(parameters, gradients, m, working, blocks, i, coefficients, own):
    """Updates the i-th block."""
    start, stride = blocks.starts[i], blocks.strides[i]
    scratch = divided(own, blocks.rows[i], blocks.columns[i])
    total = _add_gradient(scratch.x, gradients, m, start, stride, coefficients)
    _scale(scratch.x, 1 / max(math.sqrt(total), MIN_NORM))
    update = _orthogonalise(working, scratch)
    _subtract(parameters, working, update, start, stride, coefficients)


def _iteration_for(working):
    """Returns the module that makes updates of weights of this type."""
    is_rounded = ISA.matrix_unit and working.dtype == types.int16
    return newton_schulz_bfloat16 if is_rounded else newton_schulz


_orthogonalise = choice(_iteration_for, "orthogonalise")


@jit
def _add_gradient(x, gradients, m, start, stride, coefficients):
    """Adds the gradient to its mean m and clears it -> the sum of squares of x.

    Writes x (M, N), what the update is made from.
    """
    c = coefficients
    M, N = x.shape
    beta, rest = broadcast(np.float32(c.momentum)), np.float32(1 - c.momentum)
    scale, limit = np.float32(c.gradient_scale), np.float32(c.max_gradient)
    max_gradient, min_gradient = broadcast(limit), broadcast(-limit)
    total = no_doubles()
    for row in range(M):
        for column in range(0, N, LANES):
            count, k = min(LANES, N - column), start + row * stride + column
            g = load_up_to(gradients, k, count)
            g = minimum(max_gradient, maximum(min_gradient, g * scale)) * rest
            mean = fma(load_up_to(m, k, count), beta, g)
            update = fma(mean, beta, g)
            total = add_squares(total, update)
            store_up_to(x, row * N + column, update, count)
            store_up_to(m, k, mean, count)
            store_up_to(gradients, k, broadcast(np.float32(0)), count)
    return sum_of_doubles(total, no_doubles())


def average_gradient(m, gradients, coefficients):
    coefficients = MuonCoefficients(*map(float, coefficients))
    _average_gradient(m, gradients, coefficients)


@parallel_jit
def _average_gradient(m, gradients, coefficients, workers):
    for worker in prange(workers):
        first, last = share(m.size, np.int64(worker), workers)
        _average_part(m, gradients, coefficients, first, last)


@jit
def _average_part(m, gradients, coefficients, first, last):
    c = coefficients
    beta, rest = broadcast(np.float32(c.momentum)), np.float32(1 - c.momentum)
    scale, limit = np.float32(c.gradient_scale), np.float32(c.max_gradient)
    max_gradient, min_gradient = broadcast(limit), broadcast(-limit)
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        g = load_up_to(gradients, i, count)
        g = minimum(max_gradient, maximum(min_gradient, g * scale)) * rest
        store_up_to(m, i, fma(load_up_to(m, i, count), beta, g), count)
        store_up_to(gradients, i, broadcast(np.float32(0)), count)


@jit
def _scale(x, factor):
    """Multiplies x by a factor."""
    for i in range(0, x.size, LANES):
        count = min(LANES, x.size - i)
        store_up_to(x, i, load_up_to(x, i, count) * np.float32(factor), count)


@jit
def _subtract(parameters, working, update, start, stride, coefficients):
    """Decays the parameters of a block and subtracts update (M, N) from them."""
    M, N = update.shape
    rate = np.float32(coefficients.learning_rate)
    keep = broadcast(np.float32(1) - rate * np.float32(coefficients.weight_decay))
    factor = np.float32(-coefficients.learning_rate * math.sqrt(max(1.0, N / M)))
    for row in range(M):
        for column in range(0, N, LANES):
            count, k = min(LANES, N - column), start + row * stride + column
            change = load_up_to(update, row * N + column, count) * factor
            p = fma(load_up_to(parameters, k, count), keep, change)
            store_up_to(parameters, k, p, count)
            if working.size > 0:
                store_up_to(working, k, p, count)
