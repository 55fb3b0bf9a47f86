"""Matrix products: a b, a^T b and a b^T, of float32 or of 16-bit numbers."""

import numpy as np

from smallmind.kernels.codegen.scratch import absent, scratch
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.gemm.blocked import (
    SCRATCH,
    SCRATCH_16,
    gemm_16,
    gemm_alone,
    gemm_parallel,
    load_packing,
)
from smallmind.kernels.gemm.packing import PLAIN, TRANSPOSE_A, TRANSPOSE_B

SINGLE_THREAD = 128 * 1024  # elements of b up to which one thread is faster than waking others

_NO_SCRATCH = np.empty((1, 0), np.float32)


def matmul(out, a, b, bias=None, addend=None):
    _gemm(out, None, a, b, bias, addend, PLAIN)


def matmul_gelu(activation, preactivation, a, b, bias=None, addend=None):
    _gemm(preactivation, activation, a, b, bias, addend, PLAIN)


def matmul_transpose_a(out, a, b, addend=None):
    _gemm(out, None, a, b, None, addend, TRANSPOSE_A)


def matmul_transpose_b(out, a, b, addend=None):
    _gemm(out, None, a, b, None, addend, TRANSPOSE_B)


def _gemm(out, activation, a, b, bias, addend, variant):
    activation = absent(a.dtype, 2) if activation is None else activation
    bias = absent(a.dtype, 1) if bias is None else bias
    addend = absent(out.dtype, 2) if addend is None else addend
    size = b.size
    if a.itemsize == 2:
        load_packing(a)
        rows = scratch(threads(), SCRATCH_16)
        gemm_16(out, activation, a, b, bias, addend, variant, rows)
    elif size <= SINGLE_THREAD and len(out) * size <= 4 * SINGLE_THREAD:
        rows = _NO_SCRATCH if len(out) == 1 else scratch(1, SCRATCH)  # one row packs nothing
        gemm_alone(out, activation, a, b, bias, addend, variant, rows)
    else:
        rows = scratch(threads(), SCRATCH)
        gemm_parallel(out, activation, a, b, bias, addend, variant, rows)
