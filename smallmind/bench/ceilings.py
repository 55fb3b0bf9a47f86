"""The machine's limits: multiply-adds from registers, and arrays of a given size in their order."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from smallmind.kernels import ceilings
from smallmind.kernels.alignment import aligned_empty
from smallmind.kernels.ceilings import multiply_add
from smallmind.kernels.codegen.simd import LANES
from smallmind.kernels.codegen.threads import set_threads, threads
from smallmind.kernels.timing import Contestant, take_in_turn

ROUNDS = 3  # of turns, the best call of which counts


class Streams:
    """Goes through arrays of `nbytes` in all, on every thread: reads, copies or updates them."""

    def __init__(self, nbytes: float) -> None:
        block = 8 * LANES
        self.nbytes = 4 * max(block, round(nbytes / 4 / block) * block)
        self._all = aligned_empty(self.nbytes // 4)
        self._all[...] = 1
        self._source, self._target = np.split(self._all, 2)
        self._sums = np.empty(threads(), np.float32)

    def read(self) -> None:
        ceilings.read(self._sums, self._all)

    def copy(self) -> None:
        """Reads one half and writes the other."""
        ceilings.copy(self._target, self._source)

    def update(self) -> None:
        """Reads everything and writes it back."""
        ceilings.update(self._all, np.float32(1))

    def copy_rate(self) -> float:
        """Returns the bytes per second of the fastest copy."""
        return self.nbytes / take_in_turn({"": Contestant(self.copy)}, ROUNDS)[""].minimum

    def rate(self) -> float:
        """Returns the bytes per second of the fastest of the three, which no kernel exceeds."""
        times = take_in_turn(self.contestants(1, 1, 1), ROUNDS)
        moved = {"read": 1, "copy": 1, "update": 2}
        return max(self.nbytes * moved[name] / each.minimum for name, each in times.items())

    def contestants(self, read: int, written: int, both: int) -> dict[str, Contestant]:
        """Returns those that `floor` needs for bytes that are read, written, or both."""
        needed = {"read": read or written, "copy": written, "update": both}
        return {name: Contestant(getattr(self, name)) for name, count in needed.items() if count}

    def floor(self, times: Mapping[str, float], read: int, written: int, both: int) -> float:
        """-> the seconds that bytes take that are read, written, or read and written back.

        By the seconds of each contestant. What is only written costs more than what is read: most
        CPUs read it too, before they overwrite it.
        """
        per_byte = {name: seconds / self.nbytes for name, seconds in times.items()}
        seconds = both and both * per_byte["update"]
        if read or written:
            seconds += read * per_byte["read"]
        if written:
            seconds += written * max(0.0, 2 * per_byte["copy"] - per_byte["read"])
        return seconds


@contextmanager
def one_thread() -> Iterator[None]:
    """Gives this thread no others within the block."""
    count = threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(count)


def copy_rate(nbytes: float) -> float:
    """Returns bytes per second that all threads read and write together."""
    return Streams(nbytes).copy_rate()


def multiply_add_rate() -> float:
    """Returns the peak operations per second of all threads."""
    return multiply_add() / take_in_turn({"": Contestant(multiply_add)}, ROUNDS)[""].minimum
