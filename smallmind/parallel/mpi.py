"""Ranks that are processes of MPI, on one machine or on several, through mpi4py."""

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from smallmind.console import activity
from smallmind.kernels.number_types import BFLOAT16
from smallmind.parallel.group import ENDED, Group

VALUE_TAG = 1  # the tag of messages with small values
MAX_SENT = 1 << 26  # bytes of an array that are sent at a time: counts of MPI are 32 bits
MPI_TYPES = {np.dtype(np.float32): MPI.FLOAT, np.dtype(BFLOAT16): MPI.INT16_T}
SPIN_SECONDS = 1e-3  # seconds of a wait in which a rank only lets others run; then it sleeps
NAP_SECONDS = 1e-4  # seconds
let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))  # macOS and Windows lack it
ENDING_SECONDS = 10.0  # seconds in which the other ranks notice that rank 0 has ended


class MPIGroup(Group):
    """The processes that `mpiexec` has started.

    `patience` is the number of seconds after which a rank that does not answer is given up;
    `neighbours` of them are on this machine.
    """

    def __init__(self, communicator: MPI.Intracomm, patience: float, neighbours: int) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.neighbours = neighbours
        self.patience = patience
        self.pending: list[_Pending] = []  # what has not been waited for
        self._lost: TimeoutError | None = None  # once ranks have been given up
        self._communicator = communicator
        hosts = communicator.allgather(MPI.Get_processor_name())
        several = len(set(hosts)) > 1
        self.names = [
            f"rank {i} on {host}" if several else f"rank {i}" for i, host in enumerate(hosts)
        ]

    def share(self, value: Any) -> list[Any]:
        """Sends values in pairs, so that an error can name who has not answered."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        data = json.dumps(value).encode()
        values: dict[int, Any] = {self.rank: json.loads(data)}
        sending = [self._communicator.Isend([data, MPI.BYTE], rank, VALUE_TAG) for rank in others]
        status = MPI.Status()

        def receive() -> bool:
            for rank in others:
                if rank in values:
                    continue
                message = self._communicator.Improbe(rank, VALUE_TAG, status)
                if message:
                    received = bytearray(status.Get_count(MPI.BYTE))
                    message.Recv([received, MPI.BYTE])
                    values[rank] = json.loads(received)
            return len(values) == self.size

        self._wait(receive, lambda: [rank for rank in others if rank not in values])
        self._wait(lambda: MPI.Request.Testall(sending), lambda: others)
        if self.rank and isinstance(values[0], dict) and ENDED in values[0]:
            raise SystemExit(values[0][ENDED])
        return [values[rank] for rank in range(self.size)]

    def send(self, array: np.ndarray) -> None:
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, data.size, MAX_SENT):
            request = self._communicator.Ibcast([data[start : start + MAX_SENT], MPI.BYTE], 0)
            self._wait(request.Test, lambda: [0])

    def spread(
        self,
        vector: np.ndarray | None,
        ends: Sequence[int],
        senders: Sequence[bool],
        buffer: np.ndarray,
    ) -> "_Pending":
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        counts = [0 if vector is None or r == self.rank else n for r, n in enumerate(lengths)]
        own = lengths[self.rank]
        arriving = [own if sends and r != self.rank else 0 for r, sends in enumerate(senders)]
        starts = np.cumsum([0, *arriving]).tolist()
        kind = MPI_TYPES[buffer.dtype]
        request = self._communicator.Ialltoallv(
            [buffer[:0] if vector is None else vector, (counts, ends[:-1]), kind],
            [buffer, (arriving, starts[:-1]), kind],
        )
        pieces = [
            buffer[start : start + count] if count else None
            for start, count in zip(starts, arriving, strict=False)
        ]
        return _Pending(self, request, pieces)

    def collect(self, vector: np.ndarray, ends: Sequence[int]) -> "_Pending":
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        whole = [vector, (lengths, ends[:-1]), MPI_TYPES[vector.dtype]]
        request = self._communicator.Iallgatherv(MPI.IN_PLACE, whole)
        return _Pending(self, request, [None] * self.size)

    def gather(self, array: np.ndarray, ends: Sequence[int]) -> np.ndarray:
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        kind = MPI_TYPES[array.dtype]
        if self.rank:
            request = self._communicator.Igatherv([array, kind], None, 0)
            self._wait(request.Test, lambda: [0])
            return array
        whole = np.empty(ends[-1], array.dtype)
        request = self._communicator.Igatherv([array, kind], [whole, (lengths, ends[:-1]), kind], 0)
        self._wait(request.Test, lambda: list(range(1, self.size)))
        return whole

    def poll(self) -> None:
        for pending in self.pending:
            pending.has_arrived()

    def end(self, status: int) -> bool:
        """Rank 0 ends the others, who wait for it or will soon -> whether they did."""
        self.patience = min(self.patience, ENDING_SECONDS)
        try:
            self.share({ENDED: status})
        except TimeoutError:
            return False
        return True

    def abort(self, status: int) -> None:
        """Ends all ranks at once: this one cannot continue."""
        self._communicator.Abort(status)

    def _wait(self, is_done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Waits until is_done(). TimeoutError names the missing ranks if that takes too long.

        After that it waits for nothing: those that still answer wait for the missing ones too.
        """
        if is_done():
            return
        if self._lost:
            raise self._lost
        begun = time.monotonic()
        with activity.doing("Waiting for other ranks", usual=True):
            while not is_done():
                waited = time.monotonic() - begun
                if waited < SPIN_SECONDS:
                    let_others_run()  # ranks may share a core
                    continue
                time.sleep(NAP_SECONDS)
                activity.tick()
                if waited > self.patience:
                    names = ", ".join(self.names[rank] for rank in missing())
                    message = f"no answer from {names} for {self.patience:g} seconds"
                    self._lost = TimeoutError(message)
                    raise self._lost


class _Pending:
    """A request of MPI and the arrays that it fills."""

    def __init__(
        self, group: MPIGroup, request: MPI.Request, pieces: list[np.ndarray | None]
    ) -> None:
        self._group = group
        self._request = request
        self._pieces = pieces
        group.pending.append(self)

    def has_arrived(self) -> bool:
        """Returns True if the data has arrived; MPI makes progress while it is asked."""
        return bool(self._request.Test())

    def wait(self) -> list[np.ndarray | None]:
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        self._group._wait(self.has_arrived, lambda: others)
        self._group.pending.remove(self)
        return self._pieces
