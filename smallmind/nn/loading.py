"""Tensors of a file, read piece by piece into their places: none is in memory a second time."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.kernels import reference
from smallmind.kernels.number_types import (
    BLOCK,
    is_finite,
    is_quantised,
    kind_of,
    round_to,
    to_float32,
)
from smallmind.nn.parameters import Transposed

PIECE = 2**21  # bytes that are read at a time: they stay in a core's cache until they are used


class Stored(NamedTuple):
    """A tensor in a file, or anywhere else.

    `read(first, out)` writes its rows from number `first` on to out, contiguous and of `dtype`:
    float32, bits of 16-bit numbers, or blocks of integers: see `kernels.number_types`. InputError
    if they are gone.
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

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row as it is stored."""
        kind = kind_of(self.dtype)
        if kind is None or kind.block == 1:
            return self.shape[1:]
        return (*self.shape[1:-1], self.shape[-1] // kind.block)

    def pieces(
        self, name: str, step: int = 1, place: np.ndarray | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Reads a multiple of `step` rows at a time -> the number of the first one, rows.

        They are read into their place, or one piece after another into the same memory. InputError
        if a value is not finite.
        """
        rows = self.shape[0] if self.shape else 1
        nbytes = math.prod(self.row_shape) * np.dtype(self.dtype).itemsize
        most = max(1, PIECE // max(1, nbytes * step)) * step
        if place is None:
            piece = np.empty((min(most, rows), *self.row_shape), self.dtype)
        for first in range(0, rows, most):
            last = min(first + most, rows)
            read = piece[: last - first] if place is None else place[first:last]
            self.read(first, read)
            if not is_finite(read):
                raise InputError(f"{name} is not finite {_name(read.dtype)}")
            yield first, read
            activity.tick()

    def values(self) -> np.ndarray:
        """All of it, as float32."""
        rows = np.empty((*self.shape[:1], *self.row_shape) or 1, self.dtype)
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
    first of these rows; there are a multiple of `step` of them. A parameter that is Transposed gets
    the transpose. InputError if a value is not finite, or too large.
    """
    if write is not None:
        for first, rows in stored.pieces(name, step):
            write(first, converted(kernels, rows, parameter.dtype, name))
    elif isinstance(parameter, Transposed):
        target = parameter.view(np.ndarray)
        for first, rows in stored.pieces(name, BLOCK):
            if is_quantised(target.dtype):
                blocks = converted(kernels, to_float32(rows).T, target.dtype, name)
                target[:, first // BLOCK : first // BLOCK + blocks.shape[1]] = blocks
            else:
                kernels.transpose(target, converted(kernels, rows, target.dtype, name), first)
    else:
        target = parameter if parameter.ndim else parameter.reshape(1)
        place = target if parameter.dtype == stored.dtype else None
        for first, rows in stored.pieces(name, place=place):
            if place is None:
                rows = converted(kernels, rows, parameter.dtype, name)
                target[first : first + len(rows)] = rows


def converted(kernels: Any, rows: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Rows -> the same numbers in another type, rounded if it is smaller.

    InputError if one is too large for blocks of integers.
    """
    if rows.dtype == dtype:
        return rows
    if is_quantised(dtype):
        blocks = round_to(to_float32(rows), dtype)
        if not is_finite(blocks):
            raise InputError(f"{name} is too large for {_name(dtype)}; choose bfloat16 or float32")
        return blocks
    if is_quantised(rows.dtype):
        return converted(kernels, to_float32(rows), dtype, name)
    if kernels is reference:  # which computes in one type
        return round_to(to_float32(rows), dtype)
    out = np.empty(rows.shape, dtype)
    matrix = (1, -1) if rows.ndim == 1 else (len(rows), -1)
    kernels.copy_columns(out.reshape(matrix), rows.reshape(matrix), 0)
    return out


def _name(dtype: Any) -> str:
    kind = kind_of(dtype)
    return kind.precision or kind.name if kind else str(dtype)
