"""Functions of single elements, and their derivatives: activations, soft capping, sums, copies."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.codegen.simd import (
    LANES,
    LOG2_E,
    broadcast,
    fma,
    load,
    load_first,
    load_up_to,
    maximum,
    share,
    sigmoid,
    sigmoid_base2,
    start_of_overlapping,
    store,
    store_first,
    store_up_to,
)
from smallmind.kernels.gelu import gelu_and_derivative_of, gelu_of


@parallel_jit
def gelu(y, x, workers):
    """Leaves y in training to the product that computes x: see `matmul_gelu`."""
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        whole = last - last % LANES
        for place in range(first, whole, LANES):
            store(y, place, gelu_of(load(x, place)))
        if whole < last:
            store_first(y, whole, gelu_of(load_first(x, whole, last - whole)), last - whole)


@parallel_jit
def gelu_backward(dx, y, dy, x, workers):
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


@parallel_jit
def relu2(y, x, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        for place in range(first, last, LANES):
            _relu2_vector(y, x, place, min(LANES, last - place))


@inline_jit
def _relu2_vector(y, x, place, count):
    positive = maximum(broadcast(np.float32(0)), load_up_to(x, place, count))  # NaN stays
    store_up_to(y, place, positive * positive, count)


@parallel_jit
def relu2_backward(dx, y, dy, x, workers):
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


@parallel_jit
def swiglu(y, x, workers):
    R, W = y.shape
    for worker in prange(workers):
        first, last = row_share(R, np.int64(worker), workers)
        for r in range(first, last):
            _swiglu_row(y, x, r, W)


@jit
def _swiglu_row(y, x, r, W):
    whole = W - W % LANES
    for c in range(0, whole, LANES):
        _swiglu_vector(y, x, r, W, c, LANES)
    if whole < W:
        _swiglu_vector(y, x, r, W, whole, W - whole)


@inline_jit
def _swiglu_vector(y, x, r, W, c, count):
    gate = load_up_to(x, 2 * r * W + c, count)
    up = load_up_to(x, 2 * r * W + W + c, count)
    store_up_to(y, r * W + c, gate * sigmoid_base2(gate * LOG2_E) * up, count)


@parallel_jit
def swiglu_backward(dx, y, dy, x, workers):
    R, W = y.shape
    for worker in prange(workers):
        first, last = row_share(R, np.int64(worker), workers)
        outputs = start_of_overlapping(dx), start_of_overlapping(y)
        inputs = start_of_overlapping(dy), start_of_overlapping(x)
        for r in range(first, last):
            _swiglu_backward_row(*outputs, *inputs, r, W)


@jit
def _swiglu_backward_row(dx, y, dy, x, r, W):
    whole = W - W % LANES
    for i in range(whole // LANES):
        _swiglu_backward_vector(dx, y, dy, x, r, W, i * LANES, LANES)
    if whole < W:
        _swiglu_backward_vector(dx, y, dy, x, r, W, whole, W - whole)


@inline_jit
def _swiglu_backward_vector(dx, y, dy, x, r, W, c, count):
    # forward: y = silu(gate) up, silu(z) = z s, s = sigmoid(z)
    gate = load_up_to(x, 2 * r * W + c, count)
    up = load_up_to(x, 2 * r * W + W + c, count)
    d = load_up_to(dy, r * W + c, count)
    s = sigmoid_base2(gate * LOG2_E)
    silu = gate * s
    # silu' = s + z s (1 - s)
    slope = fma(silu, broadcast(np.float32(1)) - s, s)
    store_up_to(dx, 2 * r * W + c, d * up * slope, count)
    store_up_to(dx, 2 * r * W + W + c, d * silu, count)
    store_up_to(y, r * W + c, silu * up, count)


def softcap(y, x, cap):
    _softcap(y, x, np.float32(cap))


@parallel_jit
def _softcap(y, x, cap, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        _softcap_part(start_of_overlapping(y), start_of_overlapping(x), cap, first, last)


@jit
def _softcap_part(y, x, cap, first, last):
    double, one = broadcast(np.float32(2)), broadcast(np.float32(1))
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        # tanh(z) = 2 sigmoid(2 z) - 1
        tanh = double * sigmoid(load_up_to(x, i, count) * (np.float32(2) / cap)) - one
        store_up_to(y, i, tanh * cap, count)


def softcap_backward(dx, dy, y, cap):
    _softcap_backward(dx, dy, y, np.float32(cap))


@parallel_jit
def _softcap_backward(dx, dy, y, cap, workers):
    for worker in prange(workers):
        first, last = share(y.size, np.int64(worker), workers)
        gradients = start_of_overlapping(dx), start_of_overlapping(dy)
        _softcap_backward_part(*gradients, y, cap, first, last)


@jit
def _softcap_backward_part(dx, dy, y, cap, first, last):
    one = broadcast(np.float32(1))
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        tanh = load_up_to(y, i, count) * (np.float32(1) / cap)
        store_up_to(dx, i, load_up_to(dy, i, count) * (one - tanh * tanh), count)


def scale(y, x, factor):
    _scale(y, x, np.float32(factor))


@parallel_jit
def _scale(y, x, factor, workers):
    for worker in prange(workers):
        first, last = share(x.size, np.int64(worker), workers)
        _scale_part(start_of_overlapping(y), start_of_overlapping(x), factor, first, last)


@jit
def _scale_part(y, x, factor, first, last):
    for i in range(first, last, LANES):
        count = min(LANES, last - i)
        store_up_to(y, i, load_up_to(x, i, count) * factor, count)


@parallel_jit
def add_vectors(out, x, y, workers):
    for worker in prange(workers):
        first, last = share(out.size, np.int64(worker), workers)
        for i in range(first, last, LANES):
            count = min(LANES, last - i)
            store_up_to(out, i, load_up_to(x, i, count) + load_up_to(y, i, count), count)


@parallel_jit
def copy_vector(out, x, workers):
    for worker in prange(workers):
        first, last = share(out.size, np.int64(worker), workers)
        for i in range(first, last, LANES):
            count = min(LANES, last - i)
            store_up_to(out, i, load_up_to(x, i, count), count)


def clear(out):
    _clear(out.reshape(-1))


@parallel_jit
def _clear(out, workers):
    for worker in prange(workers):
        first, last = share(out.size, np.int64(worker), workers)
        for i in range(first, last, LANES):
            store_up_to(out, i, broadcast(np.float32(0)), min(LANES, last - i))
