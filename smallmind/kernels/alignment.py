"""Arrays that start on a cache line, so that no vector of them straddles two."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and a vector of the widest instruction set


def aligned_empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """shape -> a contiguous array on a cache line, contents undefined."""
    return _aligned(np.empty, shape, dtype)


def aligned_zeros(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """shape -> a contiguous array of zeros on a cache line. Untouched pages take no memory yet."""
    return _aligned(np.zeros, shape, dtype)


def _aligned(
    allocate: Callable[..., np.ndarray], shape: int | tuple[int, ...], dtype: Any
) -> np.ndarray:
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = allocate(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
