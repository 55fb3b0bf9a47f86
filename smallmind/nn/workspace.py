"""What all layers of a model share: kernels, rented memory, and the key of this pass's dropout."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from smallmind.kernels import reference
from smallmind.memory.tensor_pool import TensorPool
from smallmind.randomness import hash64

Kernel = Callable[..., Any]

_NOTHING = nullcontext()


def no_profile(_name: str) -> AbstractContextManager[None]:
    """The scope of a profiler that measures nothing."""
    return _NOTHING


class Workspace:
    """Hands layers their kernels and arrays."""

    def __init__(self, backend: str, dtype: Any, dropout: float, seed: int) -> None:
        self.kernels: Any = _kernels(backend)
        self.profile: Callable[[str], AbstractContextManager[None]] = no_profile
        self.pool = TensorPool.shared
        self.dtype = dtype
        self.activation_dtype = self.dtype  # of activations and their gradients
        self.dropout = dropout
        self.seed = seed
        self._busy = threading.Lock()
        self._rented: dict[int, np.ndarray] = {}
        self.pass_number: int | None = None  # None: evaluating, nothing is dropped

    def rent(self, *shape: int) -> np.ndarray:
        """shape -> an array for activations, of stale contents, until it is released."""
        return self._rent(shape, self.activation_dtype)

    def rent_full_precision(self, *shape: int) -> np.ndarray:
        """The same for what is never rounded to 16 bits: sums, losses, logits."""
        return self._rent(shape, self.dtype)

    def _rent(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = self.pool.rent(math.prod(shape), dtype).reshape(shape)
        self._rented[id(array)] = array
        return array

    def release(self, *arrays: np.ndarray) -> None:
        """Gives arrays from `rent` back."""
        for array in arrays:
            # In this order an interrupt in between loses one array; in the other it would be
            # returned twice.
            del self._rented[id(array)]
            self.pool.return_(array, clear=False)

    def rented(self) -> set[int]:
        """What is rented now, by identity."""
        return set(self._rented)

    def release_all_but(self, kept: set[int]) -> None:
        """Gives back all that is rented, except what `kept` identifies."""
        self.release(*(self._rented[place] for place in self._rented.keys() - kept))

    @contextmanager
    def one_pass(self, number: int | None = None) -> Iterator[None]:
        """A pass through the model: what it rents ends with it, even when it is broken off.

        number counts the passes of training, whose dropout masks follow from it.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the model is in a pass already: use it from one thread at a time")
        try:
            self.pass_number = number
            yield
        finally:
            self.pass_number = None
            try:
                self.release(*list(self._rented.values()))
            finally:
                self._busy.release()

    @contextmanager
    def wrapped_kernels(self, wrap: Callable[[str, Kernel], Kernel]) -> Iterator[None]:
        """Within the block each kernel is wrap(its name, the kernel)."""
        kernels = self.kernels
        self.kernels = _WrappedKernels(kernels, wrap)
        try:
            yield
        finally:
            self.kernels = kernels

    @property
    def training(self) -> bool:
        """Whether a backward pass follows."""
        return self.pass_number is not None

    @property
    def drop_probability(self) -> float:
        return 0.0 if self.pass_number is None else self.dropout

    def dropout_key(self, site: int) -> int:
        """The key of one place in the model: the same in the forward and backward of a pass."""
        return hash64(self.seed, self.pass_number or 0, site)


class _WrappedKernels:
    """The kernels of a back end, each as `wrap` makes it."""

    def __init__(self, kernels: Any, wrap: Callable[[str, Kernel], Kernel]) -> None:
        self._kernels = kernels
        self._wrap = wrap

    def __getattr__(self, name: str) -> Kernel:
        wrapped = self._wrap(name, getattr(self._kernels, name))
        setattr(self, name, wrapped)  # made once
        return wrapped


def _kernels(backend: str) -> ModuleType:
    if backend == "numpy":
        return reference
    # Numba takes a third of a second to import: only where it is used.
    from smallmind.kernels import compiled

    return compiled
