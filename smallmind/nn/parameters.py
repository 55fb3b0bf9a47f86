"""The parameters of a model: what is trained in one vector, its gradients in another, by name."""

import enum
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from smallmind.console import activity
from smallmind.files.safetensors import LazyTensors
from smallmind.kernels.alignment import ALIGNMENT, aligned_zeros
from smallmind.kernels.half import round_to, to_float32
from smallmind.nn.weight import Weight

ALIGNED = ALIGNMENT // 4  # elements: no two parameters share a cache line
CHUNK = 1 << 18  # elements rounded at a time: temporary arrays stay small


class Role(enum.StrEnum):
    """The purpose of a parameter: what optimizers and exports select it by, never its name."""

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
    trainable: bool = True
    is_adapter: bool = False  # trained beside a model whose own parameters are frozen

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Parameter:
    """The handle that a layer keeps. Its arrays exist once `Parameters.allocate` has been called.

    `compute` is what kernels read: float32, or rounded to 16 bits; `matrix` is the same for
    products. `grad` is what they add to: None for a parameter that is not trained.
    """

    __slots__ = ("compute", "grad", "matrix")

    def __init__(self) -> None:
        # Any, so that layers need not check for None: only NO_PARAMETER keeps it.
        self.compute: Any = None
        self.matrix: Any = None
        self.grad: Any = None


NO_PARAMETER = Parameter()  # a bias of a model without biases: kernels take None


def as_float32(stored: Mapping[str, np.ndarray], prefix: str = "") -> Mapping[str, np.ndarray]:
    """Arrays by name. Those of 16-bit numbers are converted as they are asked for, read-only.

    Only those whose names begin with `prefix`.
    """

    def converted(name: str) -> np.ndarray:
        if stored[name].dtype.kind == "f" or not name.startswith(prefix):
            return stored[name]
        values = np.empty(stored[name].shape, np.float32)
        _copy(values, stored[name])
        values.flags.writeable = False
        return values

    return LazyTensors(stored, converted)


class Copy(NamedTuple):
    """The copy of a part of `data` that layers read in its place."""

    part: slice
    values: np.ndarray


class Parameters:
    """Layers `declare` parameters while a model is built; `allocate` then gives them memory.

    `data` and `grad` are flat vectors of all that is trained: embeddings, matrices, heads, then all
    others, each group in the order of declaration, each parameter padded to a cache line. Clipping,
    updating and hashing are then one line each. A parameter that is frozen is not in them: it is an
    array of its own, and has neither gradient nor copy.

    Layers read the arrays in `compute`: parts of `data` or, for roles that `store` gives another
    number type, of `copies`. There a frozen parameter has only that type.

    `views` and `grad_views` map names to parts of the vectors; values that are frozen are
    read-only. `stored` is what a state keeps: as `views`, but frozen values as they are stored.
    """

    data: np.ndarray
    grad: np.ndarray
    copies: list[Copy]
    zeros: Callable[[int, Any], np.ndarray]  # makes vectors like these: elements, dtype
    views: Mapping[str, np.ndarray]
    grad_views: Mapping[str, np.ndarray]
    compute: Mapping[str, np.ndarray]
    stored: Mapping[str, np.ndarray]
    compute_address: Hashable  # where layers read

    def __init__(self) -> None:
        self.specs: list[ParameterSpec] = []
        self.storage: Mapping[Role, Any] = dict.fromkeys(Role)  # None: as in `data`
        self._handles: list[Parameter] = []
        self._numbers: dict[str, int] = {}  # of the names
        self._own: list[np.ndarray] = []  # the values of each, by number
        self._offsets: dict[int, int] = {}  # of those that are trained

    def declare(self, spec: ParameterSpec) -> Parameter:
        """-> the handle that the layer keeps. Allocates nothing."""
        assert not spec.widths or sum(spec.widths) == spec.shape[1]
        self._numbers[spec.name] = len(self.specs)
        self.specs.append(spec)
        self._handles.append(Parameter())
        return self._handles[-1]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, in the order of declaration."""
        return {spec.name: spec.shape for spec in self.specs}

    @property
    def trained(self) -> list[ParameterSpec]:
        """The parameters that are trained, in the order of declaration."""
        return [spec for spec in self.specs if spec.trainable]

    @property
    def kept(self) -> list[str]:
        """The names of what files keep: all parameters, or those of an adapter."""
        adapter = [spec.name for spec in self.specs if spec.is_adapter]
        return adapter or [spec.name for spec in self.specs]

    @property
    def count(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(spec.size for spec in self.specs)

    @property
    def padded_count(self) -> int:
        """Elements of a vector of all parameters."""
        return sum(_padded(spec.size) for spec in self.specs)

    @property
    def arrays(self) -> list[np.ndarray]:
        """The vector, and what is frozen."""
        frozen = zip(self.specs, self._own, strict=True)
        return [self.data, *(own for spec, own in frozen if not spec.trainable)]

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that layers read."""
        return sum(copy.values.nbytes for copy in self.copies)

    def allocate(
        self,
        dtype: Any = np.float32,
        zeros: Callable[[int, Any], np.ndarray] = aligned_zeros,
        has_contents: bool = True,
    ) -> None:
        """Makes the vectors, filled with zeros, and the views of all declared parameters.

        has_contents: False in a dry run, whose arrays are not worth copying.
        """
        self._dtype, self.zeros, self._has_contents = np.dtype(dtype), zeros, has_contents
        order = sorted(range(len(self.specs)), key=lambda i: _group(self.specs[i].role))
        self._offsets, end = {}, 0
        for i in order:
            if self.specs[i].trainable:
                self._offsets[i] = end
                end += _padded(self.specs[i].size)
        self.data = self.zeros(end, self._dtype)
        self.grad = self.zeros(end, self._dtype)
        self._own = [
            self._part(self.data, i) if spec.trainable else self._frozen(spec)
            for i, spec in enumerate(self.specs)
        ]
        gradients = {i: self._part(self.grad, i) for i in sorted(self._offsets)}
        self.grad_views = MappingProxyType({self.specs[i].name: gradients[i] for i in gradients})
        for i, handle in enumerate(self._handles):
            handle.grad = gradients.get(i)
        self.store(self.storage)

    def freeze(self, numbers: Collection[int]) -> None:
        """Trains all parameters but these, by number. All keep their values.

        Vectors that have been made are made anew, with gradients of zero.
        """
        self.specs = [
            replace(spec, trainable=i not in numbers) for i, spec in enumerate(self.specs)
        ]
        if self._own:
            before = self.stored
            self.copies = []
            self.allocate(self._dtype, self.zeros, self._has_contents)
            if self._has_contents:
                self.write(before)

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Gives parameters these values, in any number type; others keep theirs.

        KeyError for a name that is not a parameter's.
        """
        for name, value in values.items():
            _copy(self._own[self._numbers[name]], value)
        self.refresh()

    def initialise(self, seed: int) -> None:
        """Writes the values that the specs and the seed determine."""
        with activity.doing("Initialising the weights", usual=self.data.nbytes < activity.LARGE):
            for stream, spec in enumerate(activity.parts(self.specs)):
                spec.initialisation.fill(self._own[stream], seed, stream)
        self.refresh()

    def places(self) -> list[tuple[int, ParameterSpec]]:
        """Where each trained parameter begins in the vectors, from their start to their end."""
        places = [(offset, self.specs[i]) for i, offset in self._offsets.items()]
        return sorted(places, key=lambda place: place[0])

    def ranges(self, *roles: Role) -> list[slice]:
        """The contiguous ranges of the vectors whose parameters have these roles, in order.

        Parameters that layers read in different number types are in different ranges.
        """
        ranges: list[slice] = []
        last: Any = None
        for start, spec in self.places():
            if spec.role not in roles:
                continue
            stop, dtype = start + _padded(spec.size), self.storage[spec.role]
            if ranges and ranges[-1].stop == start and dtype == last:
                ranges[-1] = slice(ranges[-1].start, stop)
            else:
                ranges.append(slice(start, stop))
            last = dtype
        return ranges

    def matrices(self, numbers: range) -> slice:
        """The part of the vectors with the matrices among consecutive parameters, by number."""
        places = [
            (self._offsets[i], self._offsets[i] + _padded(self.specs[i].size))
            for i in numbers
            if i in self._offsets and self.specs[i].role == Role.MATRIX
        ]
        first = min((start for start, _ in places), default=0)
        return slice(first, max((stop for _, stop in places), default=first))

    def store(self, storage: Mapping[Role, Any]) -> None:
        """Makes layers read parameters in these number types, by role; None: that of `data`.

        Trained parameters get copies, initially zeros: `refresh` fills them, and is called after
        writing to `data` by hand; the optimizer keeps them up to date. What is frozen is rounded.
        """
        self.storage, self.copies = storage, []
        for dtype in dict.fromkeys(storage.values()):
            roles = [role for role in Role if storage[role] == dtype]
            for part in self.ranges(*roles) if dtype is not None else ():
                self.copies.append(Copy(part, self.zeros(part.stop - part.start, dtype)))
        for i, spec in enumerate(self.specs):
            before = self._own[i]
            if not spec.trainable and before.dtype != self._stored_dtype(spec):
                self._own[i] = self._frozen(spec)
                if self._has_contents:
                    _copy(self._own[i], before)
        self._connect()

    def _connect(self) -> None:
        """Maps names to arrays, and gives each handle what its layer reads."""
        compute, stored = {}, {}
        for i, (spec, handle) in enumerate(zip(self.specs, self._handles, strict=True)):
            handle.compute = stored[spec.name] = self._own[i]
            if spec.trainable:
                handle.compute = self._read(i)
            else:
                stored[spec.name] = self._own[i].view()
                stored[spec.name].flags.writeable = False
            handle.matrix = Weight(handle.compute)
            compute[spec.name] = handle.compute
        self.compute, self.stored = MappingProxyType(compute), MappingProxyType(stored)
        self.views = as_float32(self.stored)
        read = [*self.arrays, *(copy.values for copy in self.copies)]
        self.compute_address = tuple(int(array.ctypes.data) for array in read)

    def copy_of(self, part: slice) -> np.ndarray | None:
        """The copy of a range of the vectors; None if layers read the vector itself."""
        for whole, values in self.copies:
            if whole.start <= part.start and part.stop <= whole.stop:
                return values[part.start - whole.start : part.stop - whole.start]
        return None

    def refresh(self) -> None:
        """Rounds the values into the copies, if there are any."""
        for part, values in self.copies:
            _copy(values, self.data[part])

    @contextmanager
    def other_gradients(self) -> Iterator[None]:
        """Within the block, the gradients begin at zero; afterwards they are what they were."""
        kept = self.grad.copy()
        self.grad[:] = 0
        try:
            yield
        finally:
            self.grad[:] = kept

    def _stored_dtype(self, spec: ParameterSpec) -> Any:
        """The number type that layers read a parameter in."""
        return self.storage[spec.role] or self._dtype

    def _frozen(self, spec: ParameterSpec) -> np.ndarray:
        """A new array for a parameter that is not trained."""
        return self.zeros(spec.size, self._stored_dtype(spec)).reshape(spec.shape)

    def _part(self, flat: np.ndarray, i: int) -> np.ndarray:
        """The part of a vector that belongs to a trained parameter, by number."""
        spec, offset = self.specs[i], self._offsets[i]
        return flat[offset : offset + spec.size].reshape(spec.shape)

    def _read(self, i: int) -> np.ndarray:
        """The array that layers read of a trained parameter, by number."""
        spec, offset = self.specs[i], self._offsets[i]
        copy = self.copy_of(slice(offset, offset + spec.size))
        return self._own[i] if copy is None else copy.reshape(spec.shape)


def _copy(target: np.ndarray, values: np.ndarray) -> None:
    """Writes values, in any number type, to an array of the same shape."""
    if values.dtype == target.dtype:
        target[...] = values
        return
    whole, given = target.reshape(-1), values.reshape(-1)
    for start in range(0, whole.size, CHUNK):
        chunk = slice(start, start + CHUNK)
        whole[chunk] = round_to(to_float32(given[chunk]), target.dtype)


def _group(role: Role) -> int:
    """The number of the group of roles that are next to each other in the vectors."""
    return GROUPS.index(role) if role in GROUPS else len(GROUPS)


def _padded(size: int) -> int:
    """Rounds size up to whole cache lines."""
    return math.ceil(size / ALIGNED) * ALIGNED
