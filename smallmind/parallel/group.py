"""The processes that train a run: what they tell each other, the same for one and for many."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.console.signals import Stopped
from smallmind.parallel.shards import bounds

Item = TypeVar("Item")
Result = TypeVar("Result")

# Errors that end a run in order, on all ranks. Any other is a bug and ends the program.
ORDERLY = (Stopped, InputError, FloatingPointError, MemoryError, OSError)
ERRORS_BY_NAME = {kind.__name__: kind for kind in ORDERLY}
ENDED = "ended"  # the key of the exit status, in what rank 0 shares last


class Pending(Protocol):
    """Data on its way between ranks."""

    def wait(self) -> list[np.ndarray | None]:
        """Waits until it has arrived -> what each rank sent, by rank, None for this one."""


class Group:
    """The ranks of a run, seen from one of them: number `rank` of `size`. Here it is the only one.

    All ranks call the same methods in the same order. Every wait has a bound: TimeoutError names
    the ranks that have not answered.
    """

    rank: int = 0
    size: int = 1
    names: Sequence[str] = ("rank 0",)  # of each, for messages; with several hosts "... on HOST"
    neighbours: int = 1  # ranks on this machine, this one included
    agreed: Exception | None = None  # the last error that `together` raised on all ranks

    @property
    def is_first(self) -> bool:
        """True for rank 0, which has the files of the run."""
        return not self.rank

    def own(self, ends: Sequence[int]) -> slice:
        """Returns the part of a vector that is this rank's, of parts between these ends."""
        return slice(*ends[self.rank : self.rank + 2])

    def share(self, value: Any) -> list[Any]:
        """A small value of each rank, JSON-able -> those of all, by rank. Tuples become lists.

        SystemExit if rank 0 shares that the run has ENDED.
        """
        return [value]

    def agree(self, value: Result) -> Result:
        """Takes the value of rank 0, on all ranks."""
        shared: Result = self.share(value)[0]
        return shared

    def end(self, status: int) -> bool:
        """Rank 0 ends the others, who wait for it or will soon -> whether they did."""
        return True

    def abort(self, status: int) -> None:
        """Ends all ranks at once: this one cannot continue."""
        raise SystemExit(status)

    def send(self, array: np.ndarray) -> None:
        """Writes the array of rank 0 into that of every other rank."""

    def spread(
        self,
        vector: np.ndarray | None,
        ends: Sequence[int],
        senders: Sequence[bool],
        buffer: np.ndarray,
    ) -> Pending:
        """Sends vector[ends[r] : ends[r + 1]] to each other rank r; None sends nothing.

        senders: which of the ranks send something. What arrives is written to buffer.
        """
        raise AssertionError("one rank has everything")

    def collect(self, vector: np.ndarray, ends: Sequence[int]) -> Pending:
        """Writes vector[ends[r] : ends[r + 1]] of each rank r into that of all others."""
        raise AssertionError("one rank has everything")

    def poll(self) -> None:
        """Lets data on its way make progress; call it every now and then."""

    def gather(self, array: np.ndarray, ends: Sequence[int]) -> np.ndarray:
        """The parts [ends[r] : ends[r + 1]] of an array that ranks r have -> all of it on rank 0.

        On the others, their part.
        """
        return array

    def together(self, compute: Callable[[], Result]) -> list[Result]:
        """Every rank computes something JSON-able -> the results of all, by rank.

        If that raises one of the errors that end a run in order, all ranks raise it, with the name
        of the rank that met it: none waits for another that has given up.
        """
        if self.size == 1:
            return [compute()]
        error: Exception | None = None
        outcome: tuple[str | None, Any]
        try:
            outcome = None, compute()
        except ORDERLY as raised:
            kind = next(name for name, kind in ERRORS_BY_NAME.items() if isinstance(raised, kind))
            error, outcome = raised, (kind, str(raised))
        outcomes = self.share(outcome)
        failed = [rank for rank, (name, _) in enumerate(outcomes) if name]
        if not failed:
            return [result for _, result in outcomes]
        # Whoever was told to stop may still learn why another rank cannot continue.
        first = next((rank for rank in failed if outcomes[rank][0] != "Stopped"), failed[0])
        name, message = outcomes[first]
        self.agreed = ERRORS_BY_NAME[name](f"{self.names[first]}: {message or name}")
        raise self.agreed from error

    def divide(self, items: Sequence[Item], compute: Callable[[Item], Result]) -> list[Result]:
        """Computes something JSON-able of each item, in order; every rank computes a part.

        Errors as in `together`.
        """
        own = items[self.own(bounds(len(items), self.size))]
        parts = self.together(lambda: [compute(item) for item in activity.parts(own)])
        return [result for part in parts for result in part]

    def share_arrays(
        self, arrays: Mapping[str, np.ndarray], rest: Any
    ) -> tuple[Mapping[str, np.ndarray], Any]:
        """Arrays, and something JSON-able, of each rank -> those of rank 0, on all of them."""
        kinds = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
        kinds, rest = self.share((kinds, rest))[0]
        if self.rank:
            arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in kinds.items()}
        for array in arrays.values():
            self.send(np.ascontiguousarray(array))
        return arrays, rest


ALONE = Group()
