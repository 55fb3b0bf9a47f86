"""State common to all layers of a model: kernels, rented memory, the key of this pass's dropout."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np

from smallmind.console import activity
from smallmind.kernels.alignment import aligned_zeros
from smallmind.memory.tensor_pool import Reservation, TensorPool
from smallmind.nn.backend import Backend
from smallmind.randomness import hash64

Kernel = Callable[..., Any]
Result = TypeVar("Result")

_NOTHING = nullcontext()
_BEGINNING = np.zeros(1, np.int64)


def no_profile(_name: str) -> AbstractContextManager[None]:
    """Returns the scope of a profiler that measures nothing."""
    return _NOTHING


class Pass(NamedTuple):
    """A pass of training: what there is to know about it besides its batch.

    `number` counts batches, and `first_row` is the place of its rows in their batch: they determine
    the masks of dropout, with `drops`. After the backward pass of each block, whose gradients are
    complete then, it calls `after_block`, and every now and then `poll`.
    """

    number: int
    first_row: int = 0
    drops: bool = True
    after_block: Callable[[], object] | None = None
    poll: Callable[[], object] | None = None


class Workspace:
    """Gives layers their kernels and arrays.

    `layer` is the name of the layer whose kernel is running, `direction` the pass that it is in:
    "forward" or "backward", which includes recompute.
    """

    def __init__(self, backend: Backend, dtype: Any, dropout: float, seed: int) -> None:
        self.kernels = backend.kernels
        self.pool = backend.pool
        self.profile: Callable[[str], AbstractContextManager[None]] = no_profile
        self.dtype = dtype
        self.activation_dtype = dtype  # of activations and their gradients
        self.dropout = dropout
        self.seed = seed
        self.layer = ""
        self.direction = "forward"
        self.now: Pass | None = None  # None: evaluating, nothing is dropped
        self.T = 0  # tokens of each window of this pass
        # These lie in arrays, which recorded passes read again.
        self.scale = np.zeros((), dtype)  # of the gradients of this pass
        self.first_row = np.zeros((), np.int64)  # of this pass in its batch, where it drops
        self._dropout_keys: list[np.ndarray] = []  # of the places that drop activations
        self._adapter_dropout = 0.0  # the largest probability that one of them has of its own
        self._busy = threading.Lock()  # held during a pass; the owner of what the pass rents
        self._rented: dict[int, np.ndarray] = {}
        self.cache: Any = None  # the KeyValueCache that a pass continues, if it continues any
        # (N, R): what has N rows is rented with room for R, so that a pool holds the same arrays
        # for every N.
        self.room: tuple[int, int] | None = None
        self._wholes: dict[int, np.ndarray] = {}  # as the pool knows them, of arrays with more room
        self._keeps_arrays = False
        self._noted: list[np.ndarray] | None = None  # what a pass has rented so far, if it is noted
        self.reservation: Reservation | None = None  # of arrays that this pass rents, all at once
        self.new_recording, self.threads = backend.new_recording, backend.threads
        self._backend, self._uses_blas = backend, False
        # Rented for layers far apart, by name; `release_all_but` leaves them.
        self.carried: dict[str, np.ndarray] = {}

    def kernels_for(self, layer: str) -> Any:
        """Returns the kernels. Sets `layer`, for what profiles or checks them."""
        activity.tick()
        if self.now and self.now.poll:
            self.now.poll()
        self.layer = layer
        return self.kernels

    def rent(self, *shape: int) -> np.ndarray:
        """shape -> an array for activations, contents undefined; `release` it after use."""
        return self._rent(shape, self.activation_dtype)

    def rent_full_precision(self, *shape: int) -> np.ndarray:
        """Rents float32 whatever the precision: sums, losses, logits."""
        return self._rent(shape, self.dtype)

    def rent_ids(self, *shape: int) -> np.ndarray:
        """Rents int32, for numbers of tokens or rows."""
        return self._rent(shape, np.int32)

    def _rent(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if self._keeps_arrays:
            return aligned_zeros(math.prod(shape), dtype).reshape(shape)
        n = math.prod(shape)
        if self.room and shape[0] == self.room[0]:
            whole = self.pool.rent(n // shape[0] * self.room[1], dtype, self._busy)
            array = whole[:n].reshape(shape)
            self._wholes[id(array)] = whole
        else:
            array = self.pool.rent(n, dtype, self._busy).reshape(shape)
        self._rented[id(array)] = array
        if self._noted is not None:
            self._noted.append(array)
        return array

    def release(self, *arrays: np.ndarray) -> None:
        """Returns rented arrays."""
        if self._keeps_arrays:
            return
        for array in arrays:
            del self._rented[id(array)]
            self.pool.return_(self._wholes.pop(id(array), array), clear=False)

    def rented(self) -> set[int]:
        """Returns the ids of the arrays that are rented now."""
        return set(self._rented)

    def release_all_but(self, kept: set[int]) -> None:
        """Returns all rented arrays except those that are carried or whose ids are in `kept`."""
        kept = kept | {id(array) for array in self.carried.values()}
        self.release(*(self._rented[key] for key in self._rented.keys() - kept))

    def one_pass(
        self,
        compute: Callable[[], Result],
        at: Pass | None = None,
        cache: Any = None,
    ) -> Result:
        """Calls compute for a pass through the model -> its result.

        at: the pass, if it is one of training; cache: the KeyValueCache that it continues, if any.
        Whatever it rents is returned at its end, even after an error.

        Ctrl-C raises KeyboardInterrupt after any call and at the start of any function, a context
        manager's `__exit__` included. So the lock is taken and released by a `with` statement on
        the lock itself, which nothing can divide.
        """
        if self._busy.locked():
            raise RuntimeError("the model is already in a pass: use it from one thread at a time")
        with self._busy:
            try:
                self.now, self.cache, self.direction = at, cache, "forward"
                if at and (self.drop_probability or (self._adapter_dropout and at.drops)):
                    self.first_row[...] = at.first_row
                    for site, key in enumerate(self._dropout_keys):
                        key[...] = hash64(self.seed, at.number, site)
                result = compute()
                self._end_pass()
                return result
            except BaseException:
                self._end_pass()  # once more, if an interrupt came during the first time
                raise

    def _end_pass(self) -> None:
        self.now = self.cache = self.room = None
        if self.reservation:
            self.reservation.return_()
            self.reservation = None
        self.carried.clear()
        self._rented.clear()
        self._wholes.clear()
        self.pool.return_all(self._busy)

    def use_blas(self, is_used: bool) -> None:
        """Takes products of float32 from NumPy's BLAS, whose calls cannot be recorded, or not."""
        if is_used == self._uses_blas:  # kernels may be wrapped
            return
        self._uses_blas = is_used
        kernels, self.new_recording = self._backend.kernels, self._backend.new_recording
        if is_used:
            from smallmind.kernels import blas

            kernels, self.new_recording = blas, None
        self.kernels = kernels

    @contextmanager
    def using_pool(self, pool: TensorPool) -> Iterator[None]:
        """Makes passes rent from this pool within the block."""
        previous, self.pool = self.pool, pool
        try:
            yield
        finally:
            self.pool = previous

    @contextmanager
    def wrapped_kernels(self, wrap: Callable[[str, Kernel], Kernel]) -> Iterator[None]:
        """Replaces each kernel by wrap(name, kernel) within the block."""
        kernels, new_recording = self.kernels, self.new_recording
        # A recording would not call them.
        self.kernels, self.new_recording = _WrappedKernels(kernels, wrap), None
        try:
            yield
        finally:
            self.kernels, self.new_recording = kernels, new_recording

    @property
    def training(self) -> bool:
        """True if a backward pass follows."""
        return self.now is not None

    def by_rows(self, has_blocks: bool = False) -> bool:
        """-> True in a step of decoding, a token for each sequence of a cache.

        The bits of a sequence must not depend on others, nor on their number. With weights in
        blocks also in a prompt: products of small integers are faster.
        """
        return self.cache is not None and (has_blocks or self.T == 1)

    @property
    def drops(self) -> bool:
        """True if dropout is on: in passes of training."""
        return self.now is not None and self.now.drops

    @property
    def drop_probability(self) -> float:
        """The share of activations dropped in this pass: 0 in evaluations."""
        return self.dropout if self.drops else 0.0

    @property
    def starts(self) -> np.ndarray:
        """The positions of the first tokens of this pass (B,), or (1,) if they are the same.

        A recorded pass reads the array again.
        """
        return self.cache.starts if self.cache else _BEGINNING

    @contextmanager
    def noting_rents(self, keeps: bool) -> Iterator[list[np.ndarray]]:
        """Adds what is rented within the block to the list that it yields.

        If it `keeps` arrays, they are new, and stay with whoever holds them.
        """
        noted: list[np.ndarray] = []
        self._noted, self._keeps_arrays = noted, keeps
        try:
            yield noted
        finally:
            self._noted, self._keeps_arrays = None, False

    @contextmanager
    def noting_with(self, other: "Workspace") -> Iterator[None]:
        """Notes what a pass of this model rents within one of another model, as part of that."""
        self._noted = other._noted
        try:
            yield
        finally:
            self._noted = None

    @property
    def can_repeat(self) -> bool:
        """True if the calls of the kernels in this pass affect nothing but its results.

        Not so while they are profiled or checked, or somebody waits for the gradients of blocks.
        """
        is_watched = self.now and (self.now.after_block or self.now.poll)
        return self.new_recording is not None and self.profile is no_profile and not is_watched

    def new_dropout_key(self, probability: float = 0.0) -> np.ndarray:
        """Registers a place in the model that drops activations -> its key () in each pass.

        probability: its own, if that is not the one of the model.
        """
        self._adapter_dropout = max(probability, self._adapter_dropout)
        self._dropout_keys.append(np.zeros((), np.uint64))
        return self._dropout_keys[-1]


class _WrappedKernels:
    """The kernels of a back end, each as `wrap` makes it."""

    def __init__(self, kernels: Any, wrap: Callable[[str, Kernel], Kernel]) -> None:
        self._kernels = kernels
        self._wrap = wrap

    def __getattr__(self, name: str) -> Kernel:
        wrapped = self._wrap(name, getattr(self._kernels, name))
        setattr(self, name, wrapped)  # wrapped only once
        return wrapped
