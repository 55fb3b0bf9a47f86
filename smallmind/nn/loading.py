"""Tensors of a file, read piece by piece into their places: none is in memory a second time."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.kernels import reference
from smallmind.kernels.half import BFLOAT16, FLOAT16, round_to, to_float32

PIECE = 2**21  # bytes that are read at a time: they stay in a core's cache until they are used
NAMES = {np.dtype(FLOAT16): "float16", np.dtype(BFLOAT16): "bfloat16"}
# The bits of infinity by number type. Those of NaN are larger, those of all others smaller.
INFINITY = {np.dtype(np.float32): 0x7F800000, np.dtype(FLOAT16): 0x7C00, np.dtype(BFLOAT16): 0x7F80}


class Stored(NamedTuple):
    """A tensor in a file, or anywhere else.

    `read(first, out)` writes its rows from number `first` on to out, contiguous and of `dtype`:
    float32 or the bits of 16-bit numbers, as in `kernels.half`. InputError if they are gone.
    """

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[int, np.ndarray], None]

    @classmethod
    def of(cls, array: np.ndarray) -> "Stored":
        """A tensor that is in memory."""
        rows = array.reshape(array.shape or 1)

        def read(first: int, out: np.ndarray) -> None:
            out[...] = rows[first : first + len(out)]

        return cls(array.shape, array.dtype, read)

    def values(self) -> np.ndarray:
        """All of it, as float32."""
        rows = np.empty(self.shape or 1, self.dtype)
        self.read(0, rows)
        return to_float32(rows).reshape(self.shape)


def read_tensor(
    kernels: Any,
    parameter: np.ndarray,
    stored: Stored,
    name: str,
    write: Callable[[int, np.ndarray], None] | None = None,
    step: int = 1,
) -> None:
    """Writes a tensor to a parameter of the same shape, in the parameter's number type.

    If the tensor is arranged in another way, `write(first, rows)` does it, with the number of the
    first of these rows; there are a multiple of `step` of them. InputError if a value is not
    finite.
    """
    shape = stored.shape or (1,)
    target = parameter.reshape(shape) if write is None else parameter
    is_in_place = write is None and parameter.dtype == stored.dtype
    nbytes = math.prod(shape[1:]) * np.dtype(stored.dtype).itemsize
    most = max(1, PIECE // max(1, nbytes * step)) * step
    piece = np.empty((0 if is_in_place else min(most, shape[0]), *shape[1:]), stored.dtype)
    for first in range(0, shape[0], most):
        last = min(first + most, shape[0])
        rows = target[first:last] if is_in_place else piece[: last - first]
        stored.read(first, rows)
        if not is_finite(rows):
            raise InputError(f"{name} is not finite {NAMES.get(rows.dtype, rows.dtype)}")
        if not is_in_place:
            rows = converted(kernels, rows, parameter.dtype)
            if write is None:
                target[first:last] = rows
            else:
                write(first, rows)
        activity.tick()


def is_finite(values: np.ndarray) -> bool:
    """True unless a value, in any number type, is infinite or NaN."""
    bits = values.reshape(-1).view(f"u{values.itemsize}")
    magnitude = bits.dtype.type(2 ** (8 * values.itemsize - 1) - 1)  # all but the sign
    return int((bits & magnitude).max(initial=0)) < INFINITY[values.dtype]


def converted(kernels: Any, rows: np.ndarray, dtype: Any) -> np.ndarray:
    """Rows -> the same numbers in another type, rounded if it is smaller."""
    if rows.dtype == dtype:
        return rows
    if kernels is reference:  # which computes in one type
        return round_to(to_float32(rows), dtype)
    out = np.empty(rows.shape, dtype)
    matrix = (1, -1) if rows.ndim == 1 else (len(rows), -1)
    kernels.copy_columns(out.reshape(matrix), rows.reshape(matrix), 0)
    return out
