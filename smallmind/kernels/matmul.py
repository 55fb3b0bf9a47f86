"""Matrix products: a b, a^T b and a b^T, of float32 or of 16-bit numbers."""

import numpy as np

from smallmind.kernels.gemm.blocked import gemm
from smallmind.kernels.gemm.packing import PLAIN, TRANSPOSE_A, TRANSPOSE_B

_NO_VECTOR = np.empty(0, np.float32)
_NO_MATRIX = np.empty((0, 0), np.float32)


def matmul(out, a, b, bias=None, addend=None):
    """a (M, K), b (K, N) -> out (M, N) = a b [+ bias (N,)] [+ addend (M, N)]. Writes out."""
    _gemm(out, None, a, b, bias, addend, PLAIN)


def matmul_gelu(activation, preactivation, a, b, bias=None):
    """a (M, K), b (K, N) -> preactivation (M, N) = a b [+ bias (N,)], activation = its GELU.

    Writes both.
    """
    _gemm(preactivation, activation, a, b, bias, None, PLAIN)


def matmul_transpose_a(out, a, b, addend=None):
    """a (K, M), b (K, N) -> out (M, N) = a^T b [+ addend (M, N), may be out]. Writes out."""
    _gemm(out, None, a, b, None, addend, TRANSPOSE_A)


def matmul_transpose_b(out, a, b, addend=None):
    """a (M, K), b (N, K) -> out (M, N) = a b^T [+ addend (M, N), may be out]. Writes out."""
    _gemm(out, None, a, b, None, addend, TRANSPOSE_B)


def _gemm(out, activation, a, b, bias, addend, variant):
    activation = _NO_MATRIX if activation is None else activation
    bias = _NO_VECTOR if bias is None else bias
    addend = _NO_MATRIX if addend is None else addend
    if a.itemsize == 2:
        # Compiled only where it is used.
        from smallmind.kernels.gemm.sixteen_bit import sixteen_bit_gemm

        sixteen_bit_gemm(out, activation, a, b, bias, addend, variant)
    else:
        gemm(out, activation, a, b, bias, addend, variant)
