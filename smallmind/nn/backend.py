"""Where a model computes: the kernels that it calls and the memory that it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallmind.config import InputError
from smallmind.kernels import reference
from smallmind.kernels.alignment import aligned_zeros
from smallmind.memory.tensor_pool import TensorPool, unbacked


@dataclass(frozen=True)
class Backend:
    """Kernels under the names in `kernels/reference.py`, a pool, and vectors for parameters."""

    name: str
    kernels: Any
    pool: TensorPool
    zeros: Callable[[int, Any], np.ndarray] = aligned_zeros

    @property
    def computes(self) -> bool:
        """False for a dry run, in which no array has contents."""
        return self.zeros is not unbacked


class NoKernels:
    """Kernels that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., float]:
        return _no_kernel


def _no_kernel(*_arguments: Any, **_named: Any) -> float:
    return 0.0


def dry_run_backend(kernels: NoKernels | None = None) -> Backend:
    """A back end that allocates and computes nothing: its pool only counts."""
    return Backend("none", kernels or NoKernels(), TensorPool(allocate=unbacked), unbacked)


def open_backend(name: str) -> Backend:
    """ "numba" or "numpy" -> the back end. InputError for another name."""
    if name == "numpy":
        return Backend(name, reference, TensorPool.shared)
    if name == "numba":
        # Numba takes a third of a second to import: only where it is used.
        from smallmind.kernels import compiled

        return Backend(name, compiled, TensorPool.shared)
    raise InputError(f"backend={name!r} must be numba or numpy")
