"""What a run shows of its progress on a line that keeps changing, at any width."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from smallmind.activity import QUIET, duration, showing_on
from smallmind.live_line import LiveLine
from smallmind.training.records import Record, StepRecord


class Progress:
    """The progress of a run as a line: step, loss, learning rate, speed and time left."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._record: StepRecord | None = None  # the newest
        self._first: StepRecord | None = None  # of this process

    def update(self, record: StepRecord) -> tuple[str, ...]:
        """The line after a step: see `line`."""
        self._first = self._first or record
        self._record = record
        return self.line(record.step)

    def line(self, step: int, so_far: str = "") -> tuple[str, ...]:
        """The line, longest variant first: step, loss and time left stay to the last.

        `so_far` is how far the step is, if it takes long: "17%, 0:12 left".
        """
        done = f" ({so_far})" if so_far else ""
        place = f"step {step:{len(str(self.steps))}}/{self.steps}{done}"
        record, first = self._record, self._first
        if record is None or first is None:
            return (place,)
        loss, rate = f"loss {record.loss:.4f}", f"lr {record.lr:.1e}"
        elapsed = record.elapsed_seconds - first.elapsed_seconds
        if not elapsed:
            return f"{place}  {loss}  {rate}", f"{place}  {loss}"
        left = elapsed / max(1, record.step - first.step) * (self.steps - record.step)
        speed, end = f"{record.tokens_per_second:,.0f} tokens/s", f"{duration(left)} left"
        return (
            f"{place}  {loss}  {rate}  {speed}  {end}",
            f"{place}  {loss}  {speed}  {end}",
            f"{place}  {loss}  {end}",
            f"{step}/{self.steps}{done}  {record.loss:.4f}  {end}",
            f"{step}{done}  {record.loss:.4f}  {duration(left)}",
        )


class ProgressLine:
    """The progress on standard error, for scripts and notebooks, and what else takes long."""

    def __init__(self, steps: int) -> None:
        self.progress = Progress(steps)
        self.line = LiveLine(sys.stderr)
        self._shown = -QUIET

    def show(self, record: Record) -> None:
        """Shows a record of a step."""
        if isinstance(record, StepRecord):
            self._show(self.progress.update(record))

    def during(self, step: int, so_far: str) -> None:
        """Shows how far a step is; outside of a terminal or notebook only if that takes long."""
        if so_far or self.line.is_live:
            self._show(self.progress.line(step, so_far))

    def activity(self, text: str | None, _usual: bool) -> None:
        """Shows what is being done besides the steps."""
        if text:
            self._show((f"{text} ...",))
        else:
            self.line.clear()

    def _show(self, variants: tuple[str, ...]) -> None:
        if self.line.is_live:
            self.line.show(*variants)
        elif time.monotonic() - self._shown >= QUIET:
            self._shown = time.monotonic()
            self.line.write(f"{variants[0]}\n")


@contextmanager
def progress_line(steps: int) -> Iterator[ProgressLine]:
    """A progress line for the duration of the block; the last state of it stays."""
    line = ProgressLine(steps)
    try:
        with showing_on(line.activity):
            yield line
    finally:
        if line.line.is_live:
            line.line.write("\n")
