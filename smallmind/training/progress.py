"""What a run shows of its progress on a line that keeps changing, at any width."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from smallmind.activity import QUIET, showing_on
from smallmind.live_line import LiveLine
from smallmind.training.records import Record, StepRecord

REFRESH = 1.0  # seconds between two changes of the line, if there is no record


def duration(seconds: float) -> str:
    """Seconds -> 0:07, 12:34 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """The progress of a run as a line: step, loss, learning rate, speed and time left."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._record: StepRecord | None = None  # the newest
        self._first: StepRecord | None = None  # of this process
        self._refreshed = time.monotonic()

    def update(self, record: StepRecord) -> tuple[str, ...]:
        """The line after a step: see `line`."""
        self._first = self._first or record
        self._record = record
        self._refreshed = time.monotonic()
        return self.line(record.step)

    def start(self, step: int) -> tuple[str, ...]:
        """The line before a step, or nothing if the last one is not a second old."""
        if time.monotonic() - self._refreshed < REFRESH:
            return ()
        self._refreshed = time.monotonic()
        return self.line(step)

    def line(self, step: int) -> tuple[str, ...]:
        """The line, longest variant first: step, loss and time left stay to the last."""
        place = f"step {step:{len(str(self.steps))}}/{self.steps}"
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
            f"{step}/{self.steps}  {record.loss:.4f}  {end}",
            f"{step}  {record.loss:.4f}  {duration(left)}",
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

    def start(self, step: int) -> None:
        """Shows that a step starts."""
        self._show(self.progress.start(step))

    def activity(self, text: str | None, _usual: bool) -> None:
        """Shows what is being done besides the steps."""
        if text:
            self._show((f"{text} ...",))
        else:
            self.line.clear()

    def _show(self, variants: tuple[str, ...]) -> None:
        if variants and self.line.is_live:
            self.line.show(*variants)
        elif variants and time.monotonic() - self._shown >= QUIET:
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
