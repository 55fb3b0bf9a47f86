"""The three matrix products with argument checks, for use outside of a model."""

import numpy as np

from smallmind.checks import InputError
from smallmind.kernels import matmul as kernels


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """a (M, K), b (K, N) -> a b (M, N), float32, written to out if given.

    InputError if the shapes do not match, or out is not C-contiguous float32 or overlaps a or b.
    """
    return _product(kernels.matmul, a, b, out, rows=0, inner=(1, 0), columns=1)


def matmul_transpose_a(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """a (K, M), b (K, N) -> a^T b (M, N), float32; no transposed copy of a is made.

    Raises InputError like `matmul`.
    """
    return _product(kernels.matmul_transpose_a, a, b, out, rows=1, inner=(0, 0), columns=1)


def matmul_transpose_b(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """a (M, K), b (N, K) -> a b^T (M, N), float32; no transposed copy of b is made.

    Raises InputError like `matmul`.
    """
    return _product(kernels.matmul_transpose_b, a, b, out, rows=0, inner=(1, 1), columns=0)


def _product(kernel, a, b, out, rows, inner, columns):
    try:
        a, b = (np.asarray(x) for x in (a, b))
    except ValueError:
        raise InputError(f"{kernel.__name__}: a matrix has rows of different lengths") from None
    if a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        raise InputError(f"{kernel.__name__}: {a.dtype} and {b.dtype} are not both real numbers")
    if a.ndim != 2 or b.ndim != 2 or a.shape[inner[0]] != b.shape[inner[1]]:
        raise InputError(f"{kernel.__name__}: shapes {a.shape} and {b.shape} do not match")
    shape = a.shape[rows], b.shape[columns]
    if out is None:
        out = np.empty(shape, np.float32)
    elif (
        not isinstance(out, np.ndarray)
        or out.shape != shape
        or out.dtype != np.float32
        or not (out.flags.c_contiguous and out.flags.writeable and out.flags.aligned)
    ):
        raise InputError(
            f"{kernel.__name__}: out must be a writable C-contiguous float32 array of shape {shape}"
        )
    elif np.may_share_memory(out, a) or np.may_share_memory(out, b):
        raise InputError(f"{kernel.__name__}: out must not overlap a or b")
    # Read-only or unaligned arrays would make Numba compile the kernel again.
    kernel(out, *(np.require(x, np.float32, ["C", "W", "A"]) for x in (a, b)))
    return out
