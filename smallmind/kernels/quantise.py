"""Rounding to blocks of small integers that share a scale, as `kernels.codecs` does it."""

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.number_types import BLOCK, HALF


@parallel_jit
def quantise(scales, q, x, workers):
    for worker in prange(workers):
        begin, end = row_share(x.shape[0], np.int64(worker), workers)
        for n in range(begin, end):
            if q.shape[1] == BLOCK:
                _block_of_8_bits(scales, q, x, n)
            else:
                _block_of_4_bits(scales, q, x, n)


@jit
def _block_of_8_bits(scales, q, x, n):
    scale = abs(_largest(x, n)) / np.float32(127)
    inverse = _inverse(scale)
    scales[n] = scale
    for i in range(BLOCK):
        scaled = x[n, i] * inverse
        q[n, i] = np.int8(scaled + (np.float32(0.5) if scaled >= 0 else np.float32(-0.5)))


@jit
def _block_of_4_bits(scales, q, x, n):
    scale = _largest(x, n) / np.float32(-8)
    inverse = np.float64(_inverse(scale))
    scales[n] = scale
    for i in range(HALF):
        # In float64: whether the product is rounded before the addition depends on the CPU.
        low = np.int32(np.float64(x[n, i]) * inverse + 8.5)
        high = np.int32(np.float64(x[n, HALF + i]) * inverse + 8.5)
        q[n, i] = np.uint8(min(low, np.int32(15)) | min(high, np.int32(15)) << 4)


@jit
def _largest(x, n):
    """-> the value of a block with the largest magnitude, the first of several; NaN if one is."""
    found, magnitude = x[n, 0], abs(x[n, 0])
    for i in range(1, BLOCK):
        if abs(x[n, i]) > magnitude or x[n, i] != x[n, i]:
            found, magnitude = x[n, i], abs(x[n, i])
    return found


@jit
def _inverse(scale):
    """-> 1 / scale; 0 if that is not finite, as such values are zeros in float16."""
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    return np.float32(0) if abs(inverse) == np.float32(np.inf) else inverse
