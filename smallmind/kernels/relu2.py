"""The square of ReLU (So et al. 2021), and its derivative."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    load_up_to,
    maximum,
    share,
    start_of_overlapping,
    store_up_to,
)
from smallmind.kernels.codegen.threads import threads


def relu2(y, x):
    """x (R, C) -> y (R, C) = max(x, 0)^2. Writes y."""
    _relu2(y, x, threads())


@parallel_jit
def _relu2(y, x, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        for place in range(first, last, LANES):
            _relu2_vector(y, x, place, min(LANES, last - place))


@inline_jit
def _relu2_vector(y, x, place, count):
    positive = maximum(broadcast(np.float32(0)), load_up_to(x, place, count))  # NaN stays
    store_up_to(y, place, positive * positive, count)


def relu2_backward(dx, y, dy, x):
    """dy, x (R, C) -> dx (R, C) = dy 2 max(x, 0), y (R, C) = max(x, 0)^2.

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    _relu2_backward(dx, y, dy, x, threads())


@parallel_jit
def _relu2_backward(dx, y, dy, x, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        outputs = start_of_overlapping(dx), start_of_overlapping(y)
        inputs = start_of_overlapping(dy), start_of_overlapping(x)
        _relu2_backward_part(*outputs, *inputs, first, last)


@jit
def _relu2_backward_part(dx, y, dy, x, first, last):
    whole = last - last % LANES
    for i in range(first // LANES, whole // LANES):
        _relu2_backward_vector(dx, y, dy, x, i * LANES, LANES)
    if whole < last:
        _relu2_backward_vector(dx, y, dy, x, whole, last - whole)


@inline_jit
def _relu2_backward_vector(dx, y, dy, x, place, count):
    positive = maximum(broadcast(np.float32(0)), load_up_to(x, place, count))  # NaN stays
    gradient = load_up_to(dy, place, count)
    store_up_to(dx, place, gradient * (positive + positive), count)
    store_up_to(y, place, positive * positive, count)
