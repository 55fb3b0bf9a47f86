"""Calls of any kernel, made from its description: to check it by its plain twin, and to time it."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.kernels import reference
from smallmind.kernels.alignment import aligned_empty
from smallmind.kernels.description import ADDED, KERNELS, Arguments, Array, described
from smallmind.kernels.number_types import (
    BFLOAT16,
    BLOCK,
    DTYPES,
    FLOAT16,
    is_quantised,
    round_to,
    to_float32,
)
from smallmind.kernels.sizes import usual_sizes
from smallmind.parts import NUMBER_TYPES, QUANTISED

Sizes = tuple[int, ...]
# The types that activations are stored in, float32 first.
FLOATS = {kind.precision: DTYPES[name] for name, kind in NUMBER_TYPES.items() if kind.block == 1}
GUARD, GUARDED = 0x5A, 256  # the bytes around an output, and how many on either side
LENGTHS = (1, 2, 3, 5, 17, 33, 64, 130)  # of axes: none a multiple of anything, and a few vectors
MOST_ELEMENTS = 2**15  # elements of all arrays of a call with awkward sizes
# The largest error that a check accepts, relative to the largest element of an output or to 1, and
# what a number of this type loses when it is rounded.
TOLERANCE = 2e-5
ROUNDING = {np.dtype(np.float32): 0.0, np.dtype(FLOAT16): 2.0**-11, np.dtype(BFLOAT16): 2.0**-8}


class WrongError(ArithmeticError):
    """A kernel does not do what its plain twin does."""


def kernels() -> list[str]:
    """Returns the names of all kernels: those of the package, then those that were added."""
    return [*KERNELS, *ADDED]


def types(name: str) -> tuple[str, ...]:
    """Returns the number types that a kernel computes in; the first is the one to measure."""
    kinds = {array.kind for array in described(name).arguments.arrays.values()}
    if "blocks" in kinds:
        return tuple(QUANTISED)
    return tuple(FLOATS) if "" in kinds else ("float32",)


def shapes(name: str) -> Sequence[Sizes]:
    """Returns the sizes that a kernel is measured at."""
    arguments = described(name).arguments
    return arguments.shapes or usual_sizes(arguments.axes)


def awkward(name: str) -> Iterator[Sizes]:
    """Yields sizes that are no multiples of anything, so small that checks are quick."""
    arguments = described(name).arguments
    for first in range(len(LENGTHS)):
        sizes = [LENGTHS[(first + 3 * i) % len(LENGTHS)] for i in range(len(arguments.axes))]
        yield fitted(name, sizes, MOST_ELEMENTS)


def fitted(name: str, sizes: Sequence[int], most: int) -> Sizes:
    """-> the sizes, the largest of them halved until all arrays have at most so many elements.

    Those of rows of blocks are rounded up to whole blocks.
    """
    arguments, fitting = described(name).arguments, list(sizes)
    while elements(name, fitting) > most:
        fitting[fitting.index(max(fitting))] //= 2
    whole = _axes_of_blocks(arguments)
    return tuple(
        -(-size // BLOCK) * BLOCK if axis in whole else size
        for axis, size in zip(arguments.axes, fitting, strict=True)
    )


def elements(name: str, sizes: Sequence[int]) -> int:
    """Returns the number of elements of all arrays of a call."""
    arguments = described(name).arguments
    by_axis = dict(zip(arguments.axes, sizes, strict=True))
    return sum(math.prod(_shape(x.dims, by_axis)) for x in arguments.arrays.values())


def _axes_of_blocks(arguments: Arguments) -> set[str]:
    return {array.dims[-1] for array in arguments.arrays.values() if array.kind == "blocks"}


def _shape(dims: Sequence[str], sizes: dict[str, int]) -> Sizes:
    """Returns the numbers that B*T, 2*W, K or 65 stand for."""

    def product(text: str) -> int:
        return math.prod(int(x) if x.isdecimal() else sizes[x] for x in text.split("*"))

    return tuple(map(product, dims))


@functools.cache
def intensity(name: str) -> float:
    """Returns the operations per byte of a kernel: hardly any size changes those of most."""
    sizes = [64] * len(described(name).arguments.axes)
    case = Case(name, fitted(name, sizes, MOST_ELEMENTS), types(name)[0])
    read, written, both = case.traffic()
    return case.exact(count=True)[1] / (read + written + 2 * both)


class Maker(SimpleNamespace):
    """Gives a function that makes an argument the sizes of axes and the arrays, by name."""

    def __init__(self, sizes: dict[str, int], seed: int) -> None:
        super().__init__(**sizes, random=np.random.default_rng(seed))

    def some_of(self, n: int, count: int) -> np.ndarray:
        """Returns so many different numbers below n, in any order."""
        return self.random.permutation(n)[:count].astype(np.int32)


class Case:
    """One call of a kernel. Its outputs lie between guards, and hold NaN unless they are read.

    With `optional` it has every argument that may be left out. InputError for sizes that the kernel
    cannot have.
    """

    def __init__(
        self,
        name: str,
        sizes: Sequence[int],
        dtype: str = "float32",
        optional: bool = False,
        seed: int = 0,
    ) -> None:
        self.name, self.sizes, self.dtype = name, tuple(sizes), dtype
        self.description = described(name)
        self.takes = arguments = self.description.arguments
        if len(self.sizes) != len(arguments.axes):
            raise InputError(f"{name} needs one size for each of {' '.join(arguments.axes)}")
        by_axis = dict(zip(arguments.axes, self.sizes, strict=True))
        if part := [x for x in _axes_of_blocks(arguments) if by_axis[x] % BLOCK]:
            raise InputError(f"{name}: {part[0]} must be a multiple of {BLOCK}")
        make = Maker(by_axis, seed + math.prod(self.sizes))
        signature = inspect.signature(getattr(reference, name))
        self.names = list(signature.parameters)[: self.description.writes]
        found: dict[str, Any] = {}
        left_out = {key for key, x in arguments.arrays.items() if x.is_optional and not optional}
        for key, array in arguments.arrays.items():
            if array.dims and key not in left_out:
                found[key] = self._made(array, _shape(array.dims, by_axis), make)
                setattr(make, key, found[key])
        value: Any
        for key, value in arguments.values.items():
            if key in left_out:
                continue
            value = by_axis[value] if isinstance(value, str) else value
            value = value(make) if callable(value) else value
            if key in found and value.dtype != found[key].dtype:
                value = round_to(value, found[key].dtype)
            found[key] = value
        self.names += [
            key
            for key, x in arguments.arrays.items()
            if (x.is_written or x.is_read) and key in found and key not in self.names
        ]
        last = max(i for i, key in enumerate(signature.parameters) if key in found)
        self.arguments = {
            key: found.get(key, parameter.default)
            for key, parameter in list(signature.parameters.items())[: last + 1]
        }
        if arguments.after:
            self._continue(Case(arguments.after, sizes, dtype, optional, seed))
        self._raws: dict[str, np.ndarray] = {}
        for key, value in self.arguments.items():
            if isinstance(value, np.ndarray):
                self.arguments[key] = self._between_guards(key, value)
        self._start = {
            key: self.arguments[key].copy() for key in self.arguments if self._is_restored(key)
        }

    @property
    def label(self) -> str:
        """The kernel, its sizes and its type."""
        kind = "" if self.dtype == types(self.name)[0] else f" {self.dtype}"
        return f"{self.name} {'x'.join(map(str, self.sizes))}{kind}"

    def _made(self, array: Array, shape: Sizes, make: Maker) -> np.ndarray:
        if array.below:
            end = int(array.below) if array.below.isdecimal() else getattr(make, array.below)
            return make.random.integers(0, end, shape, dtype=array.kind)
        if array.kind.startswith(("int", "uint")):
            return make.random.integers(0, 100, shape).astype(array.kind)
        numbers = make.random.standard_normal(shape, dtype=np.float32)
        if array.kind == "blocks":
            return round_to(numbers, DTYPES[self.dtype])
        return numbers if array.kind or self.dtype == "float32" else self.rounded(numbers)

    def rounded(self, numbers: np.ndarray) -> np.ndarray:
        """Returns numbers in the type that the kernel computes in."""
        return np.ascontiguousarray(round_to(numbers, FLOATS[self.dtype]))

    def _continue(self, forward: "Case") -> None:
        """Takes what the kernel of the forward pass writes, and what it was given."""
        forward.run()
        for key in self.arguments:
            if key in forward.arguments and key not in self.names:
                self.arguments[key] = forward.arguments[key]

    def _is_restored(self, key: str) -> bool:
        array = self.takes.arrays.get(key)
        return key in self.names or bool(array and array.is_consumed)

    def _between_guards(self, key: str, values: np.ndarray) -> np.ndarray:
        raw = aligned_empty(values.nbytes + 2 * GUARDED, np.uint8)
        raw[:GUARDED] = raw[-GUARDED:] = GUARD
        self._raws[key] = raw
        array = raw[GUARDED : GUARDED + values.nbytes].view(values.dtype).reshape(values.shape)
        array[...] = values
        if key in self.names and not self.takes.arrays[key].is_read:
            # NaN in every type that has one.
            array.reshape(-1).view(np.uint8)[...] = 0xFF
            if values.dtype in (FLOAT16, BFLOAT16):
                array[...] = 0x7FFF
        return array

    def restore(self) -> None:
        """Gives outputs, and what a call consumes, their first contents again."""
        for key, values in self._start.items():
            np.copyto(self.arguments[key], values)

    def restore_consumed(self) -> None:
        """Gives only what a call consumes its first contents again."""
        for key, array in self.takes.arrays.items():
            if array.is_consumed:
                np.copyto(self.arguments[key], self._start[key])

    def overlap(self) -> None:
        """Lets outputs overwrite the input that a call consumes anyway, as in training."""
        for key, array in self.takes.arrays.items():
            for target in array.may_be:
                other: Any = self.arguments.get(target)
                is_consumed = target in self.arguments and self.takes.arrays[target].is_consumed
                if is_consumed and self.arguments[key].dtype == other.dtype:
                    self.arguments[key] = other
                    del self._start[key]

    @property
    def is_consumed(self) -> bool:
        """True if a call leaves something else in what it reads."""
        return any(array.is_consumed for array in self.takes.arrays.values())

    def run(self, kernel: Callable[..., Any] | None = None) -> Any:
        """Calls the compiled kernel, or another function of these arguments."""
        from smallmind.kernels import compiled

        return (kernel or getattr(compiled, self.name))(*self.arguments.values())

    def outputs(self, returned: Any = None) -> dict[str, np.ndarray]:
        """Returns copies of what a call has written, or what it has returned."""
        if not self.names:
            return {"the result": np.array([returned])}
        return {key: self.arguments[key].copy() for key in self.names}

    @property
    def exact_type(self) -> Any:
        """The type that the plain twin computes in, to be exact: float64.

        Where small integers are made, float32 decides what is rounded up.
        """
        arrays = [x.dtype for x in self.arguments.values() if isinstance(x, np.ndarray)]
        has_integers = any(is_quantised(x) or x in (np.int8, np.uint8) for x in arrays)
        return np.float32 if has_integers else np.float64

    def exact(self, count: bool = False) -> tuple[dict[str, Any], int]:
        """Runs the plain twin -> what it writes exactly, and its operations if they are counted."""
        self.restore()
        given = self.widened(self.exact_type)
        counted = {key: _counted(value) if count else value for key, value in given.items()}
        Counted.operations = 0
        returned = getattr(reference, self.name)(*counted.values())
        if not self.names:
            return {"the result": np.array([returned])}, Counted.operations
        return {key: given[key] for key in self.names}, Counted.operations

    def widened(self, kind: Any) -> dict[str, Any]:
        """Returns copies of the arguments, in which numbers have a larger type."""

        def widen(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            return to_float32(value).astype(kind) if value.dtype in ROUNDING else value.copy()

        return {key: widen(value) for key, value in self.arguments.items()}

    def check(self, kernel: Callable[..., Any] | None = None) -> float:
        """Compares a call with the plain twin -> the largest error, relative to the largest number.

        Also on one thread and on all of them, and with outputs that are inputs. WrongError if they
        differ, if an output is left unwritten, or if the kernel writes elsewhere.
        """
        from smallmind.kernels.codegen import threads

        exact, _ = self.exact()
        self.restore()
        inputs = {
            key: value.tobytes()
            for key, value in self.arguments.items()
            if isinstance(value, np.ndarray) and not self._is_restored(key)
        }
        found = self.outputs(self.run(kernel))
        self._check_elsewhere(inputs)
        error = max(self._error(key, found[key], exact[key]) for key in found)
        if (count := threads.max_threads()) > 1:
            before, are_fixed = threads.threads(), threads.are_fixed()
            try:
                for other in {1, count} - {before}:
                    threads.set_threads(other)
                    self.restore()
                    again = self.outputs(self.run(kernel))
                    self._check_same(found, again, f"on {other} threads")
            finally:
                threads.set_threads(before, are_fixed)
        self._check_in_place(found, kernel)
        self.restore()
        return error

    def _fail(self, what: str) -> None:
        raise WrongError(f"{self.label} is wrong: {what}")

    def _check_elsewhere(self, inputs: dict[str, bytes]) -> None:
        for key, value in self.arguments.items():
            if not isinstance(value, np.ndarray):
                continue
            if key in inputs and inputs[key] != value.tobytes():
                self._fail(f"it changes {key}, which is an input")
            raw = self._raws[key]
            if (raw[:GUARDED] != GUARD).any() or (raw[-GUARDED:] != GUARD).any():
                self._fail(f"it writes outside of {key}")

    def _error(self, key: str, found: np.ndarray, exact: np.ndarray) -> float:
        if is_quantised(found.dtype) or exact.dtype.kind != "f":
            if found.tobytes() != exact.tobytes():
                self._fail(f"{key} differs")
            return 0.0
        rounding = ROUNDING.get(found.dtype, 0.0)
        values, scale = to_float32(found), max(1.0, float(np.abs(exact).max(initial=0)))
        # Products of bfloat16 may round their intermediate results too.
        allowed = scale * max(TOLERANCE, 2 * ROUNDING.get(FLOATS.get(self.dtype, found.dtype), 0))
        difference = np.abs(values - exact)
        if not (difference <= allowed + 1.01 * rounding * np.abs(exact)).all():
            place = np.unravel_index(np.argmax(np.nan_to_num(difference, nan=np.inf)), exact.shape)
            at = ", ".join(map(str, place))
            self._fail(f"{key}[{at}] is {values[place]:.6g}, not {exact[place]:.6g}")
        return float(difference.max(initial=0) / scale)

    def _check_same(self, found: dict[str, Any], again: dict[str, Any], when: str) -> None:
        for key, values in found.items():
            if values.tobytes() != again[key].tobytes():
                self._fail(f"{key} has other bits {when}")

    def _check_in_place(self, found: dict[str, Any], kernel: Callable[..., Any] | None) -> None:
        """Checks outputs that may be inputs, where these are given and of the same type."""
        own, arrays = self.arguments, self.takes.arrays
        pairs = [(key, target) for key, array in arrays.items() for target in array.may_be]
        # All outputs at once, then each in its other places.
        first = {key: array.may_be[0] for key, array in arrays.items() if array.may_be}
        for places in (first, *({key: x} for key, x in pairs if first[key] != x)):
            given = {key: target for key, target in places.items() if own.get(target) is not None}
            if not given or any(own[x].dtype != own[key].dtype for key, x in given.items()):
                continue
            self.restore()
            copies = {target: own[target].copy() for target in given.values()}
            self.arguments = own | {key: copies[x] for key, x in given.items()} | copies
            try:
                again = self.outputs(self.run(kernel))
            finally:
                self.arguments = own
            self._check_same(found, again, "where it may be an input: " + ", ".join(given))

    def traffic(self) -> tuple[int, int, int]:
        """Returns the bytes that are read, written, and both read and written: each once."""
        by_axis = dict(zip(self.takes.axes, self.sizes, strict=True))
        read = written = both = 0
        arrays = {id(x): (key, x) for key, x in self.arguments.items() if isinstance(x, np.ndarray)}
        for key, value in arrays.values():  # what is an input and an output counts once
            array = self.takes.arrays.get(key)
            nbytes = value.nbytes
            if array and array.moved:
                nbytes = math.prod(_shape(array.moved, by_axis)) * value.itemsize
            if array and (array.is_consumed or (key in self.names and array.is_read)):
                both += nbytes
            elif key not in self.names:
                read += nbytes
            else:
                written += nbytes
        return read, written, both


def _counted(value: Any) -> Any:
    return value.view(Counted) if isinstance(value, np.ndarray) and not value.dtype.names else value


class Counted(np.ndarray):
    """An array that counts the arithmetic on it: a product's multiplications and additions, and one
    operation for each element of any other function, such as exp.
    """

    operations = 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        plain = [_plain(x) for x in inputs]
        if out:
            kwargs["out"] = tuple(map(_plain, out))
        result = getattr(ufunc, method)(*plain, **kwargs)
        size = np.size(plain[0]) if method != "__call__" else np.size(result)
        if ufunc is np.matmul:
            size *= 2 * plain[0].shape[-1]
        if np.result_type(plain[0]).kind == "f":
            Counted.operations += int(size)
        return out[0] if out else _counted(result)

    def __array_function__(self, function: Any, kinds: Any, inputs: Any, named: Any) -> Any:
        if function is np.einsum:
            Counted.operations += 2 * max(np.size(x) for x in inputs)
        result = super().__array_function__(function, kinds, inputs, named)
        return _counted(result) if isinstance(result, np.ndarray) else result


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Counted) else value
