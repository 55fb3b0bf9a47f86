"""Placeholders for arrays that kernels can do without."""

import functools
from typing import Any

import numpy as np


@functools.cache
def absent(dtype: Any, dimensions: int) -> np.ndarray:
    """An empty array.

    With the dtype that the array would have: the version of a kernel that is compiled with it is
    the one without it too, and compiling a product takes seconds.
    """
    return np.empty((0,) * dimensions, dtype)
