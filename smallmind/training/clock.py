"""Where the time of a run goes: steps, and the evaluations between them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from smallmind.training.records import RunProgress


class StepClock:
    """Adds the time that passes to progress.seconds, and tells how fast the last steps were."""

    def __init__(self, progress: RunProgress) -> None:
        self.restart(progress)

    def restart(self, progress: RunProgress) -> None:
        """From now on for a run that is there; what was not told of yet is forgotten."""
        self._progress = progress
        self._tick = time.perf_counter()
        self._seconds, self._steps, self._windows = 0.0, 0, 0

    def count(self, windows: int) -> None:
        """A step has ended, of so many windows."""
        self._seconds += self._passed()
        self._steps += 1
        self._windows += windows

    def since_last(self) -> tuple[float, float]:
        """Seconds a step and windows a second since the last call, evaluations left out."""
        seconds, steps, windows = self._seconds, self._steps, self._windows
        self._seconds, self._steps, self._windows = 0.0, 0, 0
        if seconds <= 0:  # where the clock was set back
            return 0.0, 0.0
        return seconds / steps, windows / seconds

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block time goes to evaluations."""
        self._seconds += self._passed()
        try:
            yield
        finally:
            self._progress.seconds["evaluations"] += self._passed()

    def _passed(self) -> float:
        now = time.perf_counter()
        seconds, self._tick = now - self._tick, now
        self._progress.seconds["total"] += seconds
        return seconds
