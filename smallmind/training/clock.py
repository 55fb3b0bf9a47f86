"""The time that a run spends on steps, evaluations and samples. Compiling does not count."""

from collections.abc import Iterator
from contextlib import contextmanager

from smallmind.console.activity import clock
from smallmind.training.records import RunProgress


class StepClock:
    """Adds elapsed time to progress.seconds, and measures the speed of the last steps."""

    def __init__(self, progress: RunProgress) -> None:
        self.stepping = 0.0  # seconds that steps have taken
        self.restart(progress)

    def restart(self, progress: RunProgress) -> None:
        """Measures for this progress from now on; steps that were not reported yet are dropped."""
        self._progress = progress
        self._tick = clock()
        self._seconds, self._steps, self._windows = 0.0, 0, 0

    def count(self, windows: int) -> None:
        """Counts a step that has ended, and its windows."""
        self._add()
        self._steps += 1
        self._windows += windows

    def since_last(self) -> tuple[float, float]:
        """Returns seconds per step and windows per second since the last call, of steps alone."""
        seconds, steps, windows = self._seconds, self._steps, self._windows
        self._seconds, self._steps, self._windows = 0.0, 0, 0
        if seconds <= 0:  # shorter than a tick of the clock
            return 0.0, 0.0
        return seconds / steps, windows / seconds

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Counts the time within the block as that of `kind`, such as "samples", not of steps."""
        self._add()
        try:
            yield
        finally:
            seconds = self._progress.seconds
            seconds[kind] = seconds.get(kind, 0.0) + self._elapsed()

    def _add(self) -> None:
        seconds = self._elapsed()
        self._seconds += seconds
        self.stepping += seconds

    def _elapsed(self) -> float:
        now = clock()
        seconds, self._tick = now - self._tick, now
        self._progress.seconds["total"] += seconds
        return seconds
