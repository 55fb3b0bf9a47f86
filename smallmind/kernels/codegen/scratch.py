"""Working memory of the kernels, kept from call to call, and placeholders for absent arrays."""

import functools
import math
import threading
from typing import Any

import numpy as np

from smallmind.kernels.alignment import aligned_empty

_MAX_VIEWS = 256


class _Kept(threading.local):
    """Each Python thread has its own: it runs one kernel at a time."""

    def __init__(self) -> None:
        self.elements = aligned_empty(0)
        self.views: dict[tuple[int, int], np.ndarray] = {}  # making one takes a microsecond


_kept = _Kept()


def scratch(rows: int, size: int) -> np.ndarray:
    """-> (rows, at least size) float32, contents undefined, valid until the next call.

    No two rows share a cache line. The memory grows to the largest request and is kept, so that
    kernels allocate nothing once they have run.
    """
    view = _kept.views.get((rows, size))
    return _view(rows, size) if view is None else view


def _view(rows: int, size: int) -> np.ndarray:
    padded = math.ceil(size / 16) * 16
    if _kept.elements.size < rows * padded:
        _kept.views.clear()
        _kept.elements = aligned_empty(rows * padded)
    elif len(_kept.views) == _MAX_VIEWS:
        _kept.views.clear()
    view = _kept.elements[: rows * padded].reshape(rows, padded)
    _kept.views[rows, size] = view
    return view


def scratch_bytes() -> int:
    """Returns the bytes that this Python thread keeps."""
    return _kept.elements.nbytes


@functools.cache
def absent(dtype: Any, dimensions: int) -> np.ndarray:
    """Returns an empty array.

    With the dtype that the array would have: the version of a kernel that is compiled with it is
    the one without it too, and compiling a product takes seconds.
    """
    return np.empty((0,) * dimensions, dtype)
