"""Passes of training that are repeated: layers call their kernels only the first few times.

For small models the Python between kernels takes as long as they do. The calls of a pass are
recorded once and repeated by a loop of machine code, in the arrays that the pass rented: the pool
lends the same ones again. So a recording takes no memory, apart from two batches of ids.
"""

import hashlib
import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np

from smallmind.memory.tensor_pool import Reservation, TensorPool

Batch = tuple[np.ndarray, ...]  # ids and targets (B, T), and perhaps weights
Compute = Callable[..., np.ndarray]  # the arrays of a batch -> losses (B, T)

AFTER = 10  # passes of the same kind in a row: a recording takes as long as a hundred of them
CHECKED = 3  # repetitions that are computed by the layers too, and must be equal
KINDS = 8  # recordings of a model: micro-batches of several sizes, numbers of threads
# Bytes of all arrays. Of larger passes Python is too small a part to compute some of them twice.
LARGEST = 1024 * 1024 * 1024


class Workspace(Protocol):
    """The part of a workspace that recordings need."""

    new_recording: Callable[[], Any] | None
    threads: Callable[[], int]
    pool: TensorPool
    reservation: Reservation | None

    @property
    def can_repeat(self) -> bool: ...

    def noting_rents(self) -> Any: ...


class Vectors(Protocol):
    """The part of the parameters that recordings need."""

    data: np.ndarray
    grad: np.ndarray


class RecordedGradients:
    """Repeats the kernels' calls of passes that add to a model's gradients.

    The first repetitions are computed both ways. If results differ in any bit, layers compute with
    something other than kernels, and all further passes of that kind go through the layers.
    """

    def __init__(self) -> None:
        self._passes: dict[Hashable, int] = {}  # so far, by kind
        self._after = AFTER
        self._recorded: dict[Hashable, _Recorded | None] = {}  # None: never again

    def run(
        self,
        workspace: Workspace,
        flat: Vectors,
        constants: Hashable,
        batch: Batch,
        compute: Compute,
    ) -> np.ndarray:
        """Arrays (B, T) -> losses (B, T), rented; adds to gradients. As compute does.

        The kind of a pass is its shape, the number of threads and these constants: whatever kernels
        are given that does not lie in arrays, and where those arrays are.
        """
        if not workspace.can_repeat:
            return compute(*batch)
        # Scratch belongs to a thread.
        kind = batch[0].shape, len(batch), constants, workspace.threads(), threading.get_ident()
        recorded = self._recorded.get(kind)
        if recorded is None:
            if kind in self._recorded or not self._is_frequent(kind):
                return compute(*batch)
            return self._record(workspace, flat, kind, batch, compute)
        is_checked = recorded.checks[recorded.has_same(batch)] == CHECKED
        if not is_checked and not recorded.can_check(flat):
            return compute(*batch)
        if not recorded.rent(workspace):
            # Others have its arrays: recorded anew.
            del self._recorded[kind]
            return compute(*batch)
        if is_checked:
            return recorded.repeat(batch)
        is_equal, losses = recorded.check(workspace, flat, batch, compute)
        if not is_equal:
            self._recorded[kind] = None
        return losses

    def _is_frequent(self, kind: Hashable) -> bool:
        """Counts a pass of this kind -> whether it is worth recording."""
        if len(self._passes) > 4 * KINDS:
            self._passes.clear()
        self._passes[kind] = self._passes.get(kind, 0) + 1
        return self._passes[kind] > self._after

    def _record(
        self,
        workspace: Workspace,
        flat: Vectors,
        kind: Hashable,
        batch: Batch,
        compute: Compute,
    ) -> np.ndarray:
        assert workspace.new_recording
        own = tuple(array.copy() for array in batch)
        recording = workspace.new_recording()
        with recording.recording(), workspace.noting_rents() as rented:
            losses = compute(*own)
        recorded = None
        if recording.nbytes <= LARGEST:
            recorded = _Recorded(workspace.pool, rented, recording, own, losses, _some(flat.data))
        if len(self._recorded) == KINDS:
            # With more kinds than recordings, these must not replace each other all the time.
            self._recorded.clear()
            self._passes.clear()
            self._after *= 2
        self._recorded[kind] = recorded
        return losses


class _Recorded:
    """A pass that was recorded."""

    def __init__(
        self,
        pool: TensorPool,
        rented: list[np.ndarray],
        recording: Any,
        batch: Batch,
        losses: np.ndarray,
        weights: np.ndarray,
    ) -> None:
        self.pool = pool
        self.recording = recording
        # How often it was equal to the layers, with the batch of the recording or with others.
        self.checks = {True: 0, False: 0}
        self._rented = rented
        self._reservation: Reservation | None = None
        self._batch = batch
        self._losses = losses
        self._recorded_batch = _digest(*batch)
        self._weights = weights

    def rent(self, workspace: Workspace) -> bool:
        """Rents its arrays until the end of the pass -> False if it cannot be repeated."""
        if self.pool is not workspace.pool:
            return False
        reservation = self._reservation
        if reservation is None or not reservation.is_whole:
            reservation = self._reservation = self.pool.reserve(self._rented)
        workspace.reservation = reservation  # known there before it is rented: see `one_pass`
        return reservation is not None and reservation.rent()

    def has_same(self, batch: Batch) -> bool:
        """True if this is the batch of the recording; False if that no longer matters.

        What layers have computed from it while recording fits by chance.
        """
        if self.checks[False] == CHECKED:
            return False
        return _digest(*batch) == self._recorded_batch

    def repeat(self, batch: Batch) -> np.ndarray:
        """Arrays (B, T) -> losses (B, T); adds to gradients."""
        for own, array in zip(self._batch, batch, strict=True):
            np.copyto(own, array)
        self.recording.repeat()
        return self._losses

    def can_check(self, flat: Vectors) -> bool:
        """True if `check` would show anything.

        Not with the weights of the recording: what layers have computed from them fits by chance.
        And only where gradients begin at zero, so that they can do so again.
        """
        return not (
            np.array_equal(_some(flat.data), self._weights) or flat.grad.view(np.int32).any()
        )

    def check(
        self,
        workspace: Workspace,
        flat: Vectors,
        batch: Batch,
        compute: Compute,
    ) -> tuple[bool, np.ndarray]:
        """-> whether it equals the layers, and what they compute."""
        try:
            losses = self.repeat(batch)
            repeated = _digest(losses, flat.grad)
        finally:
            flat.grad[:] = 0
        # The layers rent the same arrays.
        assert workspace.reservation
        workspace.reservation.return_()
        losses = compute(*batch)
        self.checks[self.has_same(batch)] += 1
        return repeated == _digest(losses, flat.grad), losses


def _some(vector: np.ndarray) -> np.ndarray:
    """A copy of some elements, at equal distances."""
    return vector[:: 1 + vector.size // 1000].copy()


def _digest(*arrays: np.ndarray) -> bytes:
    """A digest: equal for two sets of arrays only if these are equal to the bit."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.data)
    return digest.digest()
