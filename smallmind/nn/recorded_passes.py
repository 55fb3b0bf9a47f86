"""Passes that are repeated: layers call their kernels only the first few times.

For small models the Python between kernels takes as long as they do. The calls of a pass are
recorded once and repeated by a loop of machine code, in the same arrays. Whatever changes from pass
to pass lies in arrays: ids, targets, weights, the scale of the loss, the keys of dropout.

The layers of this package promise that they only call kernels. A model with any other is not
recorded.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from smallmind.memory.tensor_pool import Reservation, TensorPool
from smallmind.nn.workspace import Workspace

Inputs = tuple[np.ndarray, ...]

MIN_PASSES = 10  # passes of the same kind in a row: a recording takes as long as a hundred of them
MAX_RECORDINGS = 8  # recordings of a model: micro-batches of several sizes, numbers of threads
# Bytes of all arrays, weights included: of larger passes of training Python is too small a part.
MAX_BYTES = 1024 * 1024 * 1024


class RecordedPasses:
    """Repeats the kernels' calls of passes that have become frequent.

    The caller first tries to `repeat` a pass; if that returns None, its layers compute it within
    `noting`. Recordings own their arrays, or rent them from the pool again, which takes no memory.
    """

    def __init__(
        self, after: int = MIN_PASSES, kinds: int = MAX_RECORDINGS, owns_arrays: bool = False
    ) -> None:
        self._after, self._kinds, self._owns_arrays = after, kinds, owns_arrays
        self._counts: dict[Hashable, int] = {}  # passes so far, by kind
        self._recorded: dict[Hashable, _Recorded | None] = {}  # None: too large

    def repeat(self, workspace: Workspace, kind: Hashable, inputs: Inputs) -> np.ndarray | None:
        """Computes a pass -> its result, in an array that the next one overwrites.

        None, with nothing done, if there is no recording of this kind. The kind has to say
        everything that kernels are given and that does not lie in arrays, and where arrays are.
        """
        kind = _whole(workspace, kind, inputs)
        recorded = self._recorded.get(kind) if workspace.can_repeat else None
        if recorded is None:
            return None
        if not recorded.rent(workspace):  # others have its arrays
            del self._recorded[kind]
            return None
        return recorded.repeat(inputs)

    @contextmanager
    def noting(self, workspace: Workspace, kind: Hashable, inputs: Inputs) -> Iterator["Noted"]:
        """Notes the pass that layers compute from `noted.inputs` in the block, and its result."""
        kind = _whole(workspace, kind, inputs)
        is_new = workspace.can_repeat and kind not in self._recorded
        if not (is_new and self._is_frequent(kind)):
            yield Noted(inputs)
            return
        noted = Noted(tuple(array.copy() for array in inputs))
        recording = workspace.new_recording()
        with recording.recording(), workspace.noting_rents(keeps=self._owns_arrays) as rented:
            yield noted
        if len(self._recorded) == self._kinds:
            # With more kinds than recordings, these must not replace each other all the time.
            self._recorded.clear()
            self._counts.clear()
            self._after *= 2
        pool = None if self._owns_arrays else workspace.pool
        is_too_large = pool is not None and recording.nbytes > MAX_BYTES
        recorded = None if is_too_large else _Recorded(recording, noted, pool, rented)
        self._recorded[kind] = recorded

    def _is_frequent(self, kind: Hashable) -> bool:
        """Counts a pass of this kind -> whether it is worth recording."""
        if len(self._counts) > 4 * self._kinds:
            self._counts.clear()
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return self._counts[kind] > self._after


class Noted:
    """A pass that layers compute: what they compute it from, and its result."""

    result: np.ndarray

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs


class _Recorded:
    """A pass that was recorded; without a pool it owns its arrays."""

    def __init__(
        self,
        recording: Any,
        noted: Noted,
        pool: TensorPool | None,
        rented: list[np.ndarray],
    ) -> None:
        self._recording = recording
        self._inputs, self._result = noted.inputs, noted.result
        self._pool, self._rented = pool, rented
        self._reservation: Reservation | None = None

    def rent(self, workspace: Workspace) -> bool:
        """Rents its arrays until the end of the pass -> False if it cannot be repeated."""
        if self._pool is None:
            return True
        if self._pool is not workspace.pool:
            return False
        reservation = self._reservation
        if reservation is None or not reservation.is_whole:
            reservation = self._reservation = self._pool.reserve(self._rented)
        workspace.reservation = reservation  # known there before it is rented: see `one_pass`
        return reservation is not None and reservation.rent()

    def repeat(self, inputs: Inputs) -> np.ndarray:
        for own, array in zip(self._inputs, inputs, strict=True):
            np.copyto(own, array)
        self._recording.repeat()
        return self._result


def _whole(workspace: Workspace, kind: Hashable, inputs: Inputs) -> Hashable:
    """Returns a kind, with what it always depends on. Scratch belongs to a thread."""
    shapes = tuple(array.shape for array in inputs)
    return kind, shapes, workspace.threads(), threading.get_ident()
