"""Back ends: the kernels that a model calls and the pool that it rents memory from."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.kernels import reference
from smallmind.kernels.alignment import aligned_zeros
from smallmind.kernels.description import KERNELS
from smallmind.memory.tensor_pool import TensorPool, unbacked


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


class NoKernels:
    """Kernels that do nothing. `names` are those that were asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., float]:
        self.names.add(name)
        return _no_kernel


def _no_kernel(*_arguments: Any, **_named: Any) -> float:
    return 0.0


def dry_run_backend(kernels: NoKernels | None = None) -> Backend:
    """A back end that allocates and computes nothing: its pool only counts."""
    return Backend("none", kernels or NoKernels(), TensorPool(allocate=unbacked), unbacked)


def add_kernel(
    name: str, plain: Callable[..., Any], fast: Callable[..., Any] | None = None
) -> None:
    """Gives both back ends a kernel of your own, in plain NumPy and compiled.

    Layers call it as `self.kernels.<name>`. Both functions take the same arguments, outputs first.
    Without a fast form the plain one serves, but not in 16 bits. Adding a kernel again replaces it.
    InputError if the arguments differ, or if the package has a kernel of this name.
    """
    from smallmind.kernels import compiled

    if check_type("name", name, str) in KERNELS:
        raise InputError(f"there is a kernel {name} already: choose another name")
    fast = fast or plain
    arguments = [inspect.signature(function) for function in (plain, fast)]
    if arguments[0] != arguments[1]:
        raise InputError(
            f"{name} must take the same arguments in both forms, not {arguments[0]} and "
            f"{arguments[1]}"
        )
    setattr(reference, name, plain)
    setattr(compiled, name, fast)


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
