"""The machine's limits: multiply-adds from registers, and copies of a given size."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from smallmind.kernels.ceilings import copy, multiply_add
from smallmind.kernels.codegen.simd import LANES
from smallmind.kernels.codegen.threads import set_threads, threads
from smallmind.kernels.timing import Contestant, take_in_turn


class TimedCopy:
    """A copy that reads and writes `nbytes` in all, on every thread."""

    def __init__(self, nbytes: float) -> None:
        block = 4 * LANES
        count = max(block, round(nbytes / 8 / block) * block)
        self.nbytes = 8 * count
        self.source, self.target = np.ones(count, np.float32), np.empty(count, np.float32)

    def __call__(self) -> None:
        copy(self.target, self.source)


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
    copies = TimedCopy(nbytes)
    return copies.nbytes / take_in_turn({"": Contestant(copies)}, rounds=5)[""].minimum


def multiply_add_rate() -> float:
    """Returns the peak operations per second of all threads."""
    return multiply_add() / take_in_turn({"": Contestant(multiply_add)}, rounds=5)[""].minimum
