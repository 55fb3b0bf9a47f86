"""All parameters of a model in one vector, and their gradients in another, with named views."""

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from smallmind.console import activity
from smallmind.kernels.alignment import ALIGNMENT, aligned_zeros
from smallmind.kernels.half import round_to

ALIGNED = ALIGNMENT // 4  # elements: no two parameters share a cache line
CHUNK = 1 << 18  # elements rounded at a time: temporary arrays stay small


class Role(enum.StrEnum):
    """The purpose of a parameter. Optimizers and exports select by role, never by name."""

    EMBEDDING = "embedding"  # a row per token or position
    MATRIX = "matrix"
    HEAD = "head"  # a matrix from channels to logits
    GAIN = "gain"
    BIAS = "bias"
    SCALAR = "scalar"


GROUPS = (Role.EMBEDDING, Role.MATRIX, Role.HEAD)  # in this order in the vectors; others follow


@dataclass(frozen=True)
class Normal:
    """Independent normal values with mean 0."""

    deviation: float

    def fill(self, values: np.ndarray, seed: int, stream: int) -> None:
        """Writes values, which depend only on the seed and the number of the stream."""
        # Each parameter has its own stream: its values do not depend on those before it.
        random = np.random.Generator(np.random.Philox(key=[seed, stream]))
        values[...] = self.deviation * random.standard_normal(values.shape)


@dataclass(frozen=True)
class Constant:
    """One number everywhere, or these numbers."""

    value: float | tuple[float, ...]

    def fill(self, values: np.ndarray, *_key: int) -> None:
        """Writes values."""
        values[...] = self.value


ONES, ZEROS = Constant(1.0), Constant(0.0)


@dataclass(frozen=True)
class ParameterSpec:
    """The declaration of one of a layer's parameters."""

    name: str
    shape: tuple[int, ...]
    initialisation: Normal | Constant
    role: Role
    widths: tuple[int, ...] = ()  # columns of matrices that stand side by side in this one

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Parameter:
    """The handle that a layer keeps. Both views exist once `Parameters.allocate` has been called.

    `compute` is what kernels read: float32, or the rounded copy in 16 bits. `grad` is what they
    add to.
    """

    __slots__ = ("compute", "grad")

    def __init__(self) -> None:
        # Any, so that layers need not check for None: only NO_PARAMETER keeps it.
        self.compute: Any = None
        self.grad: Any = None


NO_PARAMETER = Parameter()  # a bias of a model without biases: kernels take None


class Parameters:
    """Layers `declare` parameters while a model is built; `allocate` then gives them memory.

    `data` and `grad` are flat vectors: embeddings, matrices, heads, then all others, each group in
    the order of declaration, each parameter padded to a cache line. Saving, clipping, updating and
    hashing are then one line each. `views`, `grad_views` and `compute` map names to parts of the
    vectors.

    Layers read the views in `compute`: those of `data` or, after `store_working_copy`, those of
    `working`, a copy in 16 bits.
    """

    data: np.ndarray
    grad: np.ndarray
    working: np.ndarray | None
    zeros: Callable[[int, Any], np.ndarray]  # makes vectors like these: elements, dtype
    views: Mapping[str, np.ndarray]
    grad_views: Mapping[str, np.ndarray]
    compute: Mapping[str, np.ndarray]
    compute_address: int  # where layers read the parameters

    def __init__(self) -> None:
        self.specs: list[ParameterSpec] = []
        self._handles: list[Parameter] = []
        self._offsets: list[int] = []

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        initialisation: Normal | Constant,
        role: Role,
        widths: tuple[int, ...] = (),
    ) -> Parameter:
        """-> the handle that the layer keeps. Allocates nothing.

        widths: the columns of each matrix, if several stand side by side in this one.
        """
        assert not widths or sum(widths) == shape[1]
        self.specs.append(ParameterSpec(name, shape, initialisation, role, widths))
        self._handles.append(Parameter())
        return self._handles[-1]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, in the order of declaration."""
        return {spec.name: spec.shape for spec in self.specs}

    @property
    def count(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(spec.size for spec in self.specs)

    @property
    def padded_count(self) -> int:
        """Elements of a vector of all parameters."""
        return sum(_padded(spec.size) for spec in self.specs)

    def allocate(
        self, dtype: Any = np.float32, zeros: Callable[[int, Any], np.ndarray] = aligned_zeros
    ) -> None:
        """Makes the vectors, filled with zeros, and the views of all declared parameters."""
        self.zeros = zeros
        self._offsets = [0] * len(self.specs)
        end = 0
        for i in sorted(range(len(self.specs)), key=lambda i: _group(self.specs[i].role)):
            self._offsets[i] = end
            end += _padded(self.specs[i].size)
        self.data = self.zeros(end, dtype)
        self.grad = self.zeros(end, dtype)
        self.views = self._views(self.data)
        self.grad_views = self._views(self.grad)
        for handle, view in zip(self._handles, self.grad_views.values(), strict=True):
            handle.grad = view
        self.store_working_copy(None)

    def initialise(self, seed: int) -> None:
        """Writes the values that the specs and the seed determine."""
        with activity.doing("Initialising the weights", usual=self.data.nbytes < activity.LARGE):
            for stream, spec in enumerate(activity.parts(self.specs)):
                spec.initialisation.fill(self.views[spec.name], seed, stream)
        self.refresh()

    def places(self) -> list[tuple[int, ParameterSpec]]:
        """Where each parameter begins in the vectors, from their start to their end."""
        places = zip(self._offsets, self.specs, strict=True)
        return sorted(places, key=lambda place: place[0])

    def ranges(self, *roles: Role) -> list[slice]:
        """The contiguous ranges of the vectors whose parameters have these roles, in order."""
        ranges: list[slice] = []
        for start, spec in self.places():
            if spec.role not in roles:
                continue
            stop = start + _padded(spec.size)
            if ranges and ranges[-1].stop == start:
                ranges[-1] = slice(ranges[-1].start, stop)
            else:
                ranges.append(slice(start, stop))
        return ranges

    def matrices(self, numbers: range) -> slice:
        """The part of the vectors with the matrices among consecutive parameters, by number."""
        places = [
            (self._offsets[i], self._offsets[i] + _padded(self.specs[i].size))
            for i in numbers
            if self.specs[i].role == Role.MATRIX
        ]
        return slice(min(start for start, _ in places), max(stop for _, stop in places))

    def store_working_copy(self, dtype: Any) -> None:
        """Makes layers read a copy in dtype, initially zeros, or for None the values themselves.

        `refresh` fills it, and is called after writing to `data` by hand; the optimizer keeps it up
        to date.
        """
        self.working = None if dtype is None else self.zeros(self.data.size, dtype)
        read = self.data if self.working is None else self.working
        self.compute_address = int(read.ctypes.data)
        self.compute = self.views if self.working is None else self._views(self.working)
        for handle, view in zip(self._handles, self.compute.values(), strict=True):
            handle.compute = view

    def refresh(self) -> None:
        """Rounds the values into the working copy, if there is one."""
        if self.working is None:
            return
        for start in range(0, self.data.size, CHUNK):
            part = slice(start, start + CHUNK)
            self.working[part] = round_to(self.data[part], self.working.dtype)

    @contextmanager
    def other_gradients(self) -> Iterator[None]:
        """Within the block, the gradients begin at zero; afterwards they are what they were."""
        kept = self.grad.copy()
        self.grad[:] = 0
        try:
            yield
        finally:
            self.grad[:] = kept

    def _views(self, flat: np.ndarray) -> Mapping[str, np.ndarray]:
        return MappingProxyType(
            {
                spec.name: flat[offset : offset + spec.size].reshape(spec.shape)
                for offset, spec in zip(self._offsets, self.specs, strict=True)
            }
        )


def _group(role: Role) -> int:
    """The number of the group of roles that are next to each other in the vectors."""
    return GROUPS.index(role) if role in GROUPS else len(GROUPS)


def _padded(size: int) -> int:
    """Rounds size up to whole cache lines."""
    return math.ceil(size / ALIGNED) * ALIGNED
