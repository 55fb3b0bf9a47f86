"""The compiled kernels, but for products of float32, which are those of NumPy's BLAS.

On macOS that is Accelerate, which reaches the matrix units of Apple's CPUs; nothing else does. Its
sums may depend on the number of its threads and on its version. Other kernels are looked up in
`compiled`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from smallmind.kernels import compiled

BLOCK_ELEMENTS = 2**20  # elements of a product that is added to something, of which it takes a copy


def matmul(out, a, b, bias=None, addend=None, by_rows=False, outputs_first=False):
    if a.itemsize == 2 or by_rows:
        compiled.matmul(out, a, b, bias, addend, by_rows, outputs_first)
        return
    _multiply(out, a, b.T if outputs_first else b, addend)
    if bias is not None:
        out += bias


def matmul_gelu(
    activation, preactivation, a, b, bias=None, addend=None, by_rows=False, outputs_first=False
):
    if a.itemsize == 2 or by_rows:
        product = compiled.matmul_gelu
        product(activation, preactivation, a, b, bias, addend, by_rows, outputs_first)
        return
    matmul(preactivation, a, b, bias, addend, by_rows, outputs_first)
    compiled.gelu(activation, preactivation)


def matmul_transpose_a(out, a, b, addend=None):
    if a.itemsize == 2:
        compiled.matmul_transpose_a(out, a, b, addend)
        return
    _multiply(out, a.T, b, addend)


def matmul_transpose_b(out, a, b, addend=None):
    if a.itemsize == 2:
        compiled.matmul_transpose_b(out, a, b, addend)
        return
    _multiply(out, a, b.T, addend)


def _multiply(out: np.ndarray, a: np.ndarray, b: np.ndarray, addend: np.ndarray | None) -> None:
    """a (M, K), b (K, N) -> out (M, N) = a b [+ addend (M, N), may be out]. Writes out."""
    with np.errstate(all="ignore"):  # as compiled kernels do; Accelerate reports what is none
        if addend is None:
            np.matmul(a, b, out=out)
            return
        rows = max(1, BLOCK_ELEMENTS // max(1, out.shape[1]))
        for first in range(0, len(out), rows):
            part = slice(first, first + rows)
            np.add(a[part] @ b, addend[part], out=out[part])


def __getattr__(name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(compiled, name)
    return kernel
