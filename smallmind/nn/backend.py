"""Back ends: the kernels that a model calls, the pool that it rents from, what they compute in."""

import functools
import inspect
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_field, check_type
from smallmind.kernels import reference
from smallmind.kernels.alignment import aligned_zeros
from smallmind.kernels.description import ADDED, KERNELS, Arguments, Description
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to, to_float32
from smallmind.memory.tensor_pool import TensorPool, unbacked
from smallmind.settings.config import Precision, TrainingConfig


@dataclass(frozen=True)
class Backend:
    """Kernels named as in `kernels/reference.py`, a pool, and an allocator for parameters."""

    name: str
    kernels: Any
    pool: TensorPool
    zeros: Callable[[int, Any], np.ndarray] = aligned_zeros
    new_recording: Any = None  # makes one of the kernels' calls, if they are compiled
    threads: Callable[[], int] = lambda: 1  # that kernels divide their work among

    @property
    def computes(self) -> bool:
        """False in a dry run, whose arrays have no contents."""
        return self.zeros is not unbacked

    def check_dtype(self, dtype: Any) -> None:
        """Raises InputError for a type of parameters that it does not have."""
        is_plain = self.name == "numpy" and np.dtype(dtype) == np.float64
        if np.dtype(dtype) != np.float32 and not is_plain:
            raise InputError(f"dtype={np.dtype(dtype)} needs backend='numpy'; numba is float32")


class NoKernels:
    """Kernels that do nothing, but `called` gets the name and the arguments of each call.

    `names` are those that were asked for.
    """

    def __init__(self, called: Callable[..., object] = lambda *_, **__: None) -> None:
        self.names: set[str] = set()
        self._called = called

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.names.add(name)

        def kernel(*arguments: Any, **named: Any) -> float:
            self._called(name, *arguments, **named)
            return 0.0

        return kernel


def dry_run_backend(kernels: NoKernels | None = None) -> Backend:
    """Returns a back end that allocates and computes nothing: its pool only counts."""
    return Backend("none", kernels or NoKernels(), TensorPool(allocate=unbacked), unbacked)


def add_kernel(
    name: str, plain: Callable[..., Any], fast: Callable[..., Any] | None = None
) -> None:
    """Gives both back ends a kernel of your own, in plain NumPy and compiled.

    Layers call it as `self.kernels.<name>`. Both functions take the same arguments, outputs first.
    Without a fast form the plain one serves: in 16 bits it gets its arrays as float32, and what it
    has changed in them is rounded. Adding a kernel again replaces it. A plain form that says what
    it `takes` can be checked and measured: see `smallmind guide kernels`. InputError if the
    arguments differ, or if the package has a kernel of this name.
    """
    from smallmind.kernels import compiled

    if check_type("name", name, str) in KERNELS:
        raise InputError(f"there is a kernel {name} already: choose another name")
    if fast in (None, plain):
        fast = _in_float32(plain)
    arguments = [inspect.signature(function) for function in (plain, fast)]
    if arguments[0] != arguments[1]:
        raise InputError(
            f"{name} must take the same arguments in both forms, not {arguments[0]} and "
            f"{arguments[1]}"
        )
    setattr(reference, name, plain)
    setattr(compiled, name, fast)
    takes = getattr(plain, "arguments", Arguments())
    is_marked = any(x.is_read or x.is_written for x in takes.arrays.values())
    ADDED[name] = Description("", arguments=takes, writes=0 if is_marked else 1)


def _in_float32(plain: Callable[..., Any]) -> Callable[..., Any]:
    """plain -> a function that calls it with float32 in place of arrays of 16 bits.

    NumPy would compute with the bits as integers.
    """

    @functools.wraps(plain)
    def kernel(*arguments: Any, **named: Any) -> Any:
        # By place: arguments that are the same array still are.
        converted: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

        def values(argument: Any) -> Any:
            if not isinstance(argument, np.ndarray) or argument.dtype not in (FLOAT16, BFLOAT16):
                return argument
            key = argument.ctypes.data, argument.shape, argument.strides
            return converted.setdefault(key, (argument, to_float32(argument)))[1]

        result = plain(*map(values, arguments), **{name: values(x) for name, x in named.items()})
        # Only what has changed, so that one view of an array does not undo another.
        before = [to_float32(array) for array, _ in converted.values()]
        for (array, after), old in zip(converted.values(), before, strict=True):
            is_new = after.view(np.uint32) != old.view(np.uint32)
            if is_new.any():  # else it may be read-only
                np.copyto(array, round_to(after, array.dtype), where=is_new)
        return result

    return kernel


def open_backend(name: str) -> Backend:
    """name -> the back end "numba" or "numpy". InputError for any other name."""
    if check_type("backend", name, str) == "numpy":
        return Backend(name, reference, TensorPool.shared)
    if name == "numba":
        # Numba takes a third of a second to import: only if it is used.
        from smallmind.kernels import compiled
        from smallmind.kernels.codegen.recording import Recording
        from smallmind.kernels.codegen.threads import threads

        return Backend(name, compiled, TensorPool.shared, aligned_zeros, Recording, threads)
    raise InputError(f"backend={name!r} must be numba or numpy")


def resolve_precision(precision: str, backend: str) -> Precision:
    """Returns the precision, with AUTO resolved. InputError for 16 bits with the NumPy backend."""
    if check_type("precision", precision, str) not in tuple(Precision):
        raise InputError(f"precision={precision!r} must be one of {', '.join(Precision)}")
    precision = Precision(precision)
    if precision == Precision.AUTO:
        if backend == "numpy":
            return Precision.FLOAT32
        from smallmind.kernels.codegen.isa import ISA

        return Precision.BFLOAT16 if ISA.fast_bfloat16 else Precision.FLOAT32
    if precision.of_trained != Precision.FLOAT32 and backend == "numpy":
        raise InputError(f"precision={precision.value!r} needs backend='numba'")
    return precision


def faster_precision(precision: Precision, backend: str) -> Precision | None:
    """Returns the precision in which this CPU takes faster steps than in this one, if known.

    float16 is always converted to be multiplied, bfloat16 where the CPU has no fast product of it.
    """
    if not precision.has_16_bits or backend == "numpy":
        return None
    from smallmind.kernels.codegen.isa import ISA

    fastest = resolve_precision(Precision.AUTO, backend)
    is_known = precision == Precision.FLOAT16 or not ISA.quads  # not measured on Apple's cores
    return fastest if is_known and precision != fastest else None


def resolve_products(products: str | None, backend: str) -> str:
    """Returns the products, by default "numba". InputError for "blas" with the NumPy backend."""
    products = check_field(TrainingConfig, "products", products)
    if products == "blas" and backend == "numpy":
        raise InputError(
            "products='blas' needs backend='numba': backend='numpy' uses the BLAS anyway"
        )
    return products or "numba"


def instruction_set(backend: str, precision: Precision, products: str) -> str:
    """Returns the machine's influence on the bits of results: "AVX2" or "NumPy on x86_64"."""
    if backend == "numpy":
        return f"NumPy on {platform.machine()}"
    from smallmind.kernels.codegen.isa import ISA

    if products == "blas" and precision == Precision.FLOAT32:
        return f"{ISA.name} with NumPy's BLAS"
    if not ISA.pairs or precision != Precision.BFLOAT16:
        return ISA.name
    return f"{ISA.name} with {'AMX' if ISA.matrix_unit else 'bfloat16'}"
