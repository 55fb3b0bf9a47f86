"""The parameters of a model: what is trained in one vector, its gradients in another, by name."""

import enum
import math
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from smallmind.console import activity
from smallmind.console.signals import deferred
from smallmind.files.safetensors import LazyTensors
from smallmind.kernels.alignment import ALIGNMENT, aligned_zeros
from smallmind.kernels.number_types import BLOCK, DTYPES, is_quantised, round_to, to_float32
from smallmind.nn.weight import Weight
from smallmind.parts import PRECISIONS
from smallmind.settings.config import ModelConfig, Precision

ALIGNED_ELEMENTS = ALIGNMENT // 4  # elements: no two parameters share a cache line
CHUNK_ELEMENTS = 1 << 18  # elements rounded at a time: temporary arrays stay small


class Role(enum.StrEnum):
    """The purpose of a parameter: what optimizers and exports select it by, never its name."""

    EMBEDDING = "embedding"  # a row per token or position
    MATRIX = "matrix"
    HEAD = "head"  # a matrix from channels to logits
    GAIN = "gain"
    BIAS = "bias"
    SCALAR = "scalar"


GROUPS = (Role.EMBEDDING, Role.MATRIX, Role.HEAD)  # in this order in the vectors; others follow
OUTPUTS_FIRST = (Role.MATRIX, Role.HEAD)  # in blocks of integers, and in models that only run


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
    quantises: bool = True  # False: stays as it is where others become blocks of integers

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def outputs_first(self) -> bool:
        """True for a matrix (in, out) that is stored as (out, in) where nothing is trained.

        Products with a row, or few, then read contiguous memory. Its blocks of integers are always
        those of the transpose, as in the files of llama.cpp.
        """
        return self.role in OUTPUTS_FIRST and not self.is_adapter

    def can_be(self, dtype: Any) -> bool:
        """Returns True if it can be stored in this number type."""
        if not is_quantised(dtype):
            return True
        columns = self.shape[0 if self.outputs_first else -1]
        return self.quantises and self.role in GROUPS and columns % BLOCK == 0


class Parameter:
    """The handle that a layer keeps. Its arrays exist once `Parameters.allocate` has been called.

    `compute` is what kernels read: float32, or rounded to 16 bits; `matrix` is the same for
    products. `grad` is what they add to: None for a parameter that is not trained. An embedding may
    be multiplied as well: by a head that is tied to it.
    """

    __slots__ = ("compute", "grad", "is_multiplied", "matrix")

    def __init__(self) -> None:
        # Any, so that layers need not check for None: only NO_PARAMETER keeps it.
        self.compute: Any = None
        self.matrix: Any = None
        self.grad: Any = None
        self.is_multiplied = False


NO_PARAMETER = Parameter()  # a bias of a model without biases: kernels take None


class Transposed(np.ndarray):
    """A matrix that is stored transposed: its values (out, in), or their blocks of integers."""


def shape_of(stored: np.ndarray) -> tuple[int, ...]:
    """Returns the shape of the values that are stored."""
    shape = stored.shape
    if is_quantised(stored.dtype):
        shape = (*shape[:-1], shape[-1] * BLOCK)
    return shape[::-1] if isinstance(stored, Transposed) else shape


def as_float32(stored: Mapping[str, np.ndarray], prefix: str = "") -> Mapping[str, np.ndarray]:
    """Arrays by name. Those of fewer bits are converted as they are asked for, read-only.

    Only those whose names begin with `prefix`.
    """

    def converted(name: str) -> np.ndarray:
        if not name.startswith(prefix):
            return stored[name]
        if stored[name].dtype.kind == "f":
            is_transposed = isinstance(stored[name], Transposed)
            return stored[name].view(np.ndarray).T if is_transposed else stored[name]
        values = np.empty(shape_of(stored[name]), np.float32)
        _copy(values, stored[name])
        values.flags.writeable = False
        return values

    return LazyTensors(stored, converted)


def number_type(precision: Precision) -> Any:
    """-> the type in which numbers are stored; None: float32, or whatever type the model has."""
    return DTYPES[PRECISIONS[precision].name] if precision.has_16_bits else None


def storage_of(precision: Precision) -> dict[Role, Any]:
    """-> the number types of parameters by role; None as in `number_type`."""
    storage = dict.fromkeys(Role, number_type(precision))
    if precision.has_blocks:
        storage |= dict.fromkeys(GROUPS, DTYPES[precision])
    return storage


class WorkingCopy(NamedTuple):
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
    number type, of `copies`. There a frozen parameter has only that type. Blocks of integers are
    only for what is frozen, those of a matrix (in, out) as (out, in / BLOCK). If nothing is
    trained, matrices are (out, in) in every number type.

    `views` and `grad_views` map names to parts of the vectors; values that are frozen are
    read-only. `stored` is what a state keeps: as `views`, but frozen values as they are stored.
    """

    data: np.ndarray
    grad: np.ndarray
    copies: list[WorkingCopy]
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
        self._groups: dict[int, Any] = {}  # by number, what makes rows of the blocks again

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
    def frozen(self) -> list[ParameterSpec]:
        """The others."""
        return [spec for spec in self.specs if not spec.trainable]

    @property
    def kept(self) -> list[str]:
        """The names of what files keep: all parameters, or those of an adapter."""
        adapter = [spec.name for spec in self.specs if spec.is_adapter]
        return adapter or [spec.name for spec in self.specs]

    @property
    def ordered(self) -> list[ParameterSpec]:
        """All parameters in the order of a vector in which none is frozen."""
        groups = {role: number for number, role in enumerate(GROUPS)}
        return sorted(self.specs, key=lambda spec: groups.get(spec.role, len(groups)))

    @property
    def count(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(spec.size for spec in self.specs)

    @property
    def padded_count(self) -> int:
        """Elements of a vector of all parameters."""
        return sum(padded(spec.size) for spec in self.specs)

    @property
    def arrays(self) -> list[np.ndarray]:
        """The vector, and what is frozen."""
        pairs = zip(self.specs, self._own, strict=True)
        return [self.data, *(own for spec, own in pairs if not spec.trainable)]

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
        self._only_runs = not self.trained
        self._offsets, end = {}, 0
        for spec in self.ordered:
            if spec.trainable:
                self._offsets[self._numbers[spec.name]] = end
                end += padded(spec.size)
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
            self.in_rows()
            before = self.stored
            self.copies = []
            self.allocate(self._dtype, self.zeros, self._has_contents)
            if self._has_contents:
                self.write(before)

    def own(self, name: str) -> np.ndarray:
        """Returns the array that keeps a parameter's values; call `refresh` after writing to it."""
        self.in_rows()
        return self._own[self._numbers[name]]

    def write(self, values: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]]) -> None:
        """Gives parameters these values by name, in any number type; others keep theirs.

        KeyError for a name that is not a parameter's.
        """
        for name, value in values.items() if isinstance(values, Mapping) else values:
            _copy(self.own(name), value)
        self.refresh()

    def initialise(self, seed: int, names: Container[str] | None = None) -> None:
        """Writes the values that the specs and the seed determine, of all or of these names."""
        with activity.doing("Initialising the weights", usual=self.data.nbytes < activity.LARGE):
            for stream, spec in enumerate(activity.parts(self.specs)):
                if names is None or spec.name in names:
                    spec.initialisation.fill(self._own[stream], seed, stream)
        self.refresh()

    def places(self) -> list[tuple[int, ParameterSpec]]:
        """-> where each trained parameter begins in the vectors, from their start to their end."""
        places = [(offset, self.specs[i]) for i, offset in self._offsets.items()]
        return sorted(places, key=lambda place: place[0])

    def ranges(self, *roles: Role) -> list[slice]:
        """Returns the contiguous ranges of the vectors whose parameters have these roles, in order.

        Parameters that layers read in different number types are in different ranges.
        """
        ranges: list[slice] = []
        last: Any = None
        for start, spec in self.places():
            if spec.role not in roles:
                continue
            stop, dtype = start + padded(spec.size), self._trained_dtype(spec.role)
            if ranges and ranges[-1].stop == start and dtype == last:
                ranges[-1] = slice(ranges[-1].start, stop)
            else:
                ranges.append(slice(start, stop))
            last = dtype
        return ranges

    def matrices(self, numbers: range) -> slice:
        """-> the part of the vectors with the matrices among consecutive parameters, by number."""
        places = [
            (self._offsets[i], self._offsets[i] + padded(self.specs[i].size))
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
        self.in_rows()
        self.storage, self.copies = storage, []
        types = {role: self._trained_dtype(role) for role in Role}
        for dtype in dict.fromkeys(types.values()):
            roles = [role for role in Role if types[role] == dtype]
            for part in self.ranges(*roles) if dtype is not None else ():
                self.copies.append(WorkingCopy(part, self.zeros(part.stop - part.start, dtype)))
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
            own = stored[spec.name] = self._own[i]
            if spec.trainable:
                offset = self._offsets[i]
                copy = self.copy_of(slice(offset, offset + spec.size))
                handle.compute = own if copy is None else copy.reshape(spec.shape)
            else:
                handle.compute = own.view(np.ndarray)
                stored[spec.name] = own.view()
                stored[spec.name].flags.writeable = False
            has_blocks = is_quantised(own.dtype)
            outputs_first, in_groups = isinstance(own, Transposed), i in self._groups
            handle.matrix = Weight(handle.compute, has_blocks, outputs_first, in_groups)
            compute[spec.name] = handle.compute
        self.compute, self.stored = (
            MappingProxyType(compute),
            LazyTensors(stored, self._read_in(stored)),
        )
        self.views = as_float32(self.stored)
        read = [*self.arrays, *(copy.values for copy in self.copies)]
        self.compute_address = tuple(int(array.ctypes.data) for array in read)

    def _read_in(self, stored: Mapping[str, np.ndarray]) -> Callable[[str], np.ndarray]:
        def read(name: str) -> np.ndarray:
            self.in_rows()
            return stored[name]

        return read

    def in_groups(self, kernels: Any) -> None:
        """Rearranges blocks as products with few rows read them, in models that only run."""
        if self._groups or not self._only_runs or not is_quantised(self.storage[Role.MATRIX]):
            return
        with deferred():
            for i, (own, handle) in enumerate(zip(self._own, self._handles, strict=True)):
                is_multiplied = isinstance(own, Transposed) or handle.is_multiplied
                if is_multiplied and is_quantised(own.dtype):
                    kernels.arrange_blocks(own.view(np.ndarray))
                    self._groups[i] = kernels.arrange_blocks
            self._connect()

    def in_rows(self) -> None:
        """Makes rows of all blocks again: everything else takes them so."""
        if self._groups:
            with deferred():
                for i, arrange in self._groups.items():
                    arrange(self._own[i].view(np.ndarray), True)
                self._groups.clear()
                self._connect()

    def copy_of(self, part: slice) -> np.ndarray | None:
        """Returns the copy of a range of the vectors; None if layers read the vector itself."""
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
        """Begins with gradients of zero within the block; afterwards they are what they were."""
        kept = self.grad.copy()
        self.grad[:] = 0
        try:
            yield
        finally:
            self.grad[:] = kept

    def _trained_dtype(self, role: Role) -> Any:
        """-> the number type of the copies that layers read of what is trained; None: no copies."""
        dtype = self.storage[role]
        return None if is_quantised(dtype) else dtype

    def _stored_dtype(self, spec: ParameterSpec) -> Any:
        """Returns the number type of a parameter that is not trained."""
        dtype = self.storage[spec.role]
        return self._dtype if dtype is None or not spec.can_be(dtype) else dtype

    def _frozen(self, spec: ParameterSpec) -> np.ndarray:
        """Returns a new array for a parameter that is not trained."""
        dtype, shape = self._stored_dtype(spec), spec.shape
        has_blocks = is_quantised(dtype)
        is_transposed = spec.outputs_first and (has_blocks or self._only_runs)
        if is_transposed:
            shape = shape[::-1]
        if has_blocks:
            shape = (*shape[:-1], shape[-1] // BLOCK)
        own = self.zeros(math.prod(shape), dtype).reshape(shape)
        return own.view(Transposed) if is_transposed else own

    def _part(self, flat: np.ndarray, i: int) -> np.ndarray:
        """Returns the part of a vector that belongs to a trained parameter, by number."""
        spec, offset = self.specs[i], self._offsets[i]
        return flat[offset : offset + spec.size].reshape(spec.shape)


def _copy(target: np.ndarray, values: np.ndarray) -> None:
    """Writes values, in any number type, to an array of the same shape, some rows at a time.

    Either may be Transposed. Blocks of integers that are not said to be are what the target's are.
    """
    if isinstance(target, Transposed) or isinstance(values, Transposed):
        target, values = map(_transposed, (target, values))
    if values.dtype == target.dtype:
        target[...] = values
        return
    target, values = np.atleast_1d(target, values)
    row = max(math.prod(shape_of(x)) for x in (target, values)) // max(1, len(target))
    step = math.ceil(CHUNK_ELEMENTS / max(1, row))
    for start in range(0, len(target), step):
        part = slice(start, start + step)
        target[part] = round_to(to_float32(values[part]), target.dtype)


def _transposed(array: np.ndarray) -> np.ndarray:
    """A matrix, which may be Transposed -> (out, in), or the blocks of it."""
    is_so = isinstance(array, Transposed) or is_quantised(array.dtype)
    return array.view(np.ndarray) if is_so else array.T


def padded(size: int) -> int:
    """Elements -> with those that fill their last cache line."""
    return math.ceil(size / ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def grown(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter -> the same in this shape, of which no side is shorter.

    Whatever there is for each token is kept, and a new token has the mean of all others: it is
    neither more nor less likely than they are, and the rest of the model knows what to do with it
    (Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Rows drawn around the
    mean were learned sooner in the first 30 steps on conversations, and no better after 150.
    """
    for axis in range(value.ndim):
        if missing := shape[axis] - value.shape[axis]:
            mean = value.mean(axis=axis, keepdims=True, dtype=np.float64).astype(value.dtype)
            value = np.concatenate([value, mean.repeat(missing, axis=axis)], axis=axis)
    return value


def size_rows(config: ModelConfig, parameters: Parameters) -> list[list[str]]:
    """-> rows of a layer, the shapes of its matrices and its number of parameters, and their sum.

    One row for what all blocks have in common. If some are frozen, also how many are trained.
    """
    shapes: dict[str, list[str]] = {}  # of the matrices of each layer
    counts: dict[str, int] = {}
    for spec in parameters.specs:
        words = spec.name.split(".")
        layer = f"{config.n_layer} x {words[2]}" if words[0] == "blocks" else words[0]
        layer = layer.replace("_", " ")
        known = shapes.setdefault(layer, [])
        shape = " x ".join(map(str, spec.shape))
        if len(spec.shape) == 2 and shape not in known:
            known.append(shape)
        counts[layer] = counts.get(layer, 0) + spec.size
    rows = [[layer, ", ".join(shapes[layer]), f"{count:,}"] for layer, count in counts.items()]
    if config.tie_weights:
        rows.append(["head", "the token embedding", "0"])
    rows.append(["parameters", "", f"{parameters.count:,}"])
    trained = sum(spec.size for spec in parameters.trained)
    return rows if trained == parameters.count else [*rows, ["trained", "", f"{trained:,}"]]
