"""The live line on terminals of 40 to 200 columns, also while they are resized."""

import io
import os

import pyte
import pytest

from smallmind import activity
from smallmind.cli.console import Console
from smallmind.cli.display import ProgressDisplay
from smallmind.live_line import REWRAPPING, fit
from smallmind.training.progress import ProgressLine
from smallmind.training.records import StepRecord

STEPS = 100_000


def record(step):
    return StepRecord(
        step=step,
        loss=2.345678,
        lr=1e-3,
        grad_norm=1.0,
        tokens_per_second=123_456.0,
        elapsed_seconds=0.05 * step,
        step_ms=50.0,
        windows=12,
        precision="float32",
        loss_scale=1.0,
        clip_share=0.0,
        memory=0,
        peak_memory=0,
    )


class Terminal(io.StringIO):
    """A stream that an emulated terminal shows."""

    def __init__(self, patch, columns):
        super().__init__()
        self.columns = columns
        self.screen = pyte.Screen(columns, 24)
        self.feed = pyte.Stream(self.screen).feed
        for name in ("COLUMNS", *REWRAPPING):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm")
        patch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((self.columns, 24)))

    def isatty(self):
        return True

    def write(self, text):
        self.feed(text.replace("\n", "\r\n"))
        return len(text)

    def resize(self, columns):
        self.columns = columns
        self.screen.resize(24, columns)

    def lines(self):
        return [line.rstrip() for line in self.screen.display if line.strip()]


@pytest.mark.parametrize("columns", [*range(40, 81), 100, 120, 200])
def test_step_loss_and_time_left_stay_to_the_last(monkeypatch, columns):
    terminal = Terminal(monkeypatch, columns)
    display = ProgressDisplay(Console(terminal), STEPS)
    for step in (1, 99_990):
        display.show(record(step))
    (line,) = terminal.lines()
    whole = "step  99990/100000  loss 2.3457  lr 1.0e-03  123,456 tokens/s  0:00 left"
    assert {"99990/100000", "2.3457", "0:00"} <= set(line.split()) <= set(whole.split())
    assert columns < 80 or line == whole


def test_nothing_remains_of_a_line_when_the_terminal_is_resized(monkeypatch):
    terminal = Terminal(monkeypatch, 100)
    console = Console(terminal)
    display = ProgressDisplay(console, STEPS)
    console.line("before")
    for step, columns in enumerate((100, 60, 47, 40, 200, 41, 100), 1):
        terminal.resize(columns)
        display.show(record(step))
        before, line = terminal.lines()
        assert before == "before" and f"{step}/100000" in line
        assert line.endswith(" left") or step == 1
    terminal.resize(50)
    console.line("after")
    assert terminal.lines() == ["before", "after"]


class Rewrapping(Terminal):
    """Wraps its lines again when it becomes narrower."""

    def resize(self, columns):
        lines, self.columns = self.lines(), columns
        self.screen.reset()
        self.screen.resize(24, columns)
        self.feed("\r\n".join(lines))


def test_nothing_remains_of_a_line_that_the_terminal_has_wrapped(monkeypatch):
    terminal = Rewrapping(monkeypatch, 100)
    monkeypatch.setenv(REWRAPPING[0], "7000")
    console = Console(terminal)
    display = ProgressDisplay(console, STEPS)
    console.line("before")
    for step in (1, 2):
        display.show(record(step))
    terminal.resize(40)
    assert len(terminal.lines()) == 3
    display.show(record(3))
    assert len(terminal.lines()) == 2
    console.line("after")
    assert terminal.lines() == ["before", "after"]


def test_tables_are_no_wider_than_a_narrow_terminal(monkeypatch):
    terminal = Terminal(monkeypatch, 40)
    rows = [["text", "tiny shakespeare"], ["held out", "288 tokens, the end of the text"]]
    Console(terminal).table("Data", [*rows, ["warmup and schedule", "cosine"]])
    lines = terminal.lines()
    assert {len(line) for line in lines[1:]} == {len(lines[1])}
    for word in ("shakespeare", "tokens,", "schedule"):
        assert any(word in line for line in lines)


def test_a_line_is_cut_between_words():
    assert fit(("one two three", "one two"), 6) == "one"
    assert fit(("one two three", "one two"), 9) == "one two"


def test_compiling_is_shown_while_it_lasts(monkeypatch):
    terminal = Terminal(monkeypatch, 80)
    with activity.showing_on(Console(terminal).activity):
        activity.begin_compiling("matmul")
        activity.begin_compiling("tile")
        (line,) = terminal.lines()
        assert line.startswith("Compiling kernels for this CPU, once: ") and "tile ..." in line
        activity.end_compiling()
        activity.end_compiling()
        assert terminal.lines() == []


def test_scripts_and_notebooks_show_compiling_and_progress_on_standard_error(monkeypatch):
    terminal = Terminal(monkeypatch, 80)
    monkeypatch.setattr("sys.stderr", terminal)
    activity.begin_compiling("matmul")
    assert terminal.lines()[0].endswith("matmul ...")
    activity.end_compiling()
    assert terminal.lines() == []
    line = ProgressLine(STEPS)
    for step in (1, 2):
        line.show(record(step))
    assert terminal.lines()[0].startswith("step      2/100000  loss 2.3457")
