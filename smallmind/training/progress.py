"""Shows a run's progress on a line that keeps changing, at any width."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from smallmind.console.activity import QUIET_SECONDS, duration, showing_on
from smallmind.console.live_line import LiveLine, can_print
from smallmind.losses.reward_settings import OF_REWARDS
from smallmind.training.records import EvaluationRecord, LossRecord, Record, StepRecord

OnRecord = Callable[[Any], object]

BAR_WIDTH = 10
BAR, ASCII_BAR = "█░", "#."  # what is done, and what is left


class StatusText:
    """The progress of a run as a line: step, losses, learning rate, speed and time left."""

    def __init__(self, steps: int, stream: TextIO | None) -> None:
        self.steps = steps
        self._stream = stream
        self._record: StepRecord | None = None  # the newest
        self._first: StepRecord | None = None  # of this process
        self._held_out = ""
        self._reward = ""  # of the answers of the newest step, if they are rewarded

    def update(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._first = self._first or record
            self._record = record
        elif isinstance(record, EvaluationRecord):
            self._held_out = f"{record.val_loss:.4f}"
        elif isinstance(record, LossRecord) and record.of == OF_REWARDS:
            earned = {name: f"{value:.4f}" for name, value in record.numbers.items()}
            self._reward = earned.get("sampled_reward", self._reward)
            self._held_out = earned.get("reward", self._held_out)

    def variants(self, is_live: bool, step: int | None = None, so_far: str = "") -> tuple[str, ...]:
        """Returns the line, longest variant first: step, loss and time left stay longest.

        `step` is the one under way, by default the newest that has ended, and `so_far` its
        progress, if it takes long: "17%, 0:12 left". A live line, for a terminal, begins with a bar
        and shows the latest held-out loss too; for a file there is one variant.
        """
        ended = self._record.step if self._record else 0
        shown = ended if step is None else step
        if not is_live:
            return self._variants(shown, so_far, "", "")[:1]
        bar = draw_bar(ended / max(1, self.steps), self._stream)
        return self._variants(shown, so_far, bar, self._held_out)

    @property
    def has_begun(self) -> bool:
        return self._record is not None

    def _variants(self, step: int, so_far: str, bar: str, held_out: str) -> tuple[str, ...]:
        done = f" ({so_far})" if so_far else ""
        numbers = f"{step:{len(str(self.steps))}}/{self.steps}{done}"
        where, record, first = f"step {numbers}", self._record, self._first
        if record is None or first is None:
            return (where,)
        loss, rate = f"loss {record.loss:.4f}", f"lr {record.lr:.1e}"
        whole = f"training {loss}", held_out and f"held-out loss {held_out}", rate
        if self._reward:
            loss = f"reward {self._reward}"
            whole = loss, held_out and f"held-out reward {held_out}", rate
        held_out = held_out and f"held-out {held_out}"
        elapsed = record.elapsed_seconds - first.elapsed_seconds
        if not elapsed:
            short = _joined(bar, where, loss, held_out, rate), _joined(where, loss)
            return _joined(bar, where, *whole), *short
        number = self._reward or f"{record.loss:.4f}"
        left = elapsed / max(1, record.step - first.step) * (self.steps - record.step)
        speed, end = f"{record.tokens_per_second:,.0f} tokens/s", f"{duration(left)} left"
        return (
            _joined(bar, where, *whole, speed, end),
            _joined(bar, where, loss, held_out, rate, speed, end),
            _joined(bar, numbers, loss, held_out, speed, end),
            _joined(where, loss, held_out, speed, end),
            _joined(where, loss, held_out, end),
            _joined(where, loss, end),
            f"{step}/{self.steps}{done}  {number}  {end}",
            f"{step}{done}  {number}  {duration(left)}",
        )


def draw_bar(share: float, stream: TextIO | None) -> str:
    """Returns a bar of BAR_WIDTH characters, full for a share of 1, that a stream can print."""
    full, empty = tuple(BAR if stream is not None and can_print(stream, BAR) else ASCII_BAR)
    done = round(BAR_WIDTH * min(1.0, share))
    return full * done + empty * (BAR_WIDTH - done)


def _joined(*parts: str) -> str:
    return "  ".join(filter(None, parts))


class ProgressLine:
    """Shows progress, and other long work, on standard error, for scripts and notebooks."""

    def __init__(self) -> None:
        self.progress = StatusText(0, sys.stderr)
        self.line = LiveLine(sys.stderr)
        self._shown = -QUIET_SECONDS

    def show(self, record: Record) -> None:
        """Shows a record of a step, or of an evaluation with the next one."""
        self.progress.update(record)
        if isinstance(record, StepRecord):
            self._show()

    def during(self, step: int, so_far: str) -> None:
        """Shows the progress within a step; in a file only if it takes long."""
        if so_far or self.line.is_live:
            self._show(step, so_far)

    def activity(self, text: str | None, _usual: bool) -> None:
        if text:
            self._show_text(f"{text} ...")
        elif self.line.is_live and self.progress.has_begun:
            self._show()
        else:
            self.line.clear()

    def _show(self, step: int | None = None, so_far: str = "") -> None:
        self._show_text(*self.progress.variants(self.line.is_live, step, so_far))

    def _show_text(self, *variants: str) -> None:
        if self.line.is_live:
            self.line.show(*variants)
        elif time.monotonic() - self._shown >= QUIET_SECONDS:
            self._shown = time.monotonic()
            self.line.write(f"{variants[0]}\n")


@contextmanager
def showing_progress(wanted: bool | None) -> Iterator[ProgressLine | None]:
    """Shows a progress line within the block; the last state of it stays.

    None is for a terminal or notebook only; with False nothing is shown, not even compiling.
    """
    line = ProgressLine()
    if wanted is False:
        with showing_on(lambda _text, _usual: None):
            yield None
    elif wanted or line.line.is_live:
        try:
            with showing_on(line.activity):
                yield line
        finally:
            if line.line.is_shown:
                line.line.write("\n")
    else:
        yield None


def follow(
    records: Iterable[Record],
    training: Any,
    line: ProgressLine | None,
    steps: int,
    on_record: OnRecord | None = None,
) -> list[Record]:
    """Takes all records of a Training of `steps` steps, shows them on a line, and returns them."""
    taken, before = [], training.on_step
    if line:
        line.progress.steps = steps
        training.on_step = line.during
    try:
        for record in records:
            taken.append(record)
            if line and record.step:  # in a run by minutes the length may have changed
                line.progress.steps = training.config.steps
            if on_record:
                if line:
                    line.line.clear()  # it may print
                on_record(record)
            if line:
                line.show(record)
    finally:
        training.on_step = before
    return taken
