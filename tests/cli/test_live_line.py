"""The live line on terminals of 40 to 200 columns, also while they are resized."""

import io
import os
import re

import numpy as np
import pyte
import pytest

from smallmind.cli.console import Console
from smallmind.cli.display import ProgressDisplay
from smallmind.console import activity
from smallmind.console.live_line import REWRAPPING, fit
from smallmind.training.progress import ProgressLine
from smallmind.training.records import EvaluationRecord, StepRecord
from tests.faults.test_consoles import Recorded

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
    short = "##########  step  99990/100000  loss 2.3457  lr 1.0e-03  123,456 tokens/s  0:00 left"
    whole = short.replace("loss", "training loss")
    assert {"99990/100000", "2.3457", "0:00"} <= set(line.split()) <= set(whole.split())
    assert columns < 80 or line.startswith("##########  ")
    assert columns < 90 or line == (whole if columns > len(whole) else short)


@pytest.mark.parametrize("columns", [40, 70, 100])
def test_the_bar_grows_and_the_latest_evaluation_stays_in_view(monkeypatch, columns):
    terminal = Terminal(monkeypatch, columns)
    monkeypatch.setattr(Terminal, "encoding", "utf-8")
    display = ProgressDisplay(Console(terminal), STEPS)
    for step, val_loss in ((30_000, 3.25), (49_000, 2.5)):
        display.show(record(step))
        display.show(EvaluationRecord(step, 3.0, val_loss, 9.0, 3.0, 3.0, 0.5))
        display.show(record(step + 1))
    line = terminal.lines()[-1]
    assert ("held-out 2.5000" in line) == (columns >= 70)  # its whole name needs more
    assert line.startswith("█████░░░░░  ") == (columns >= 100)
    assert "49001/100000  " in line


@pytest.mark.parametrize(
    ("columns", "token", "indent"),
    [(40, "char", 2), (60, "char", 2), (80, "char", 20), (80, "token", 2), (200, "token", 2)],
)
def test_scores_are_below_the_losses_if_they_fit(monkeypatch, columns, token, indent):
    terminal = Terminal(monkeypatch, columns)
    display = ProgressDisplay(Console(terminal), STEPS, token)
    display.show(EvaluationRecord(30_000, 3.0, 3.25, 9.0, 3.0, 3.0, 0.5))
    scores = next(line for line in terminal.lines() if "bits/char" in line)
    assert scores.index("3.000 bits/char") == indent
    assert columns < 80 or scores.endswith("accuracy 50.0%")


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
    assert len(terminal.lines()) == 4
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


@pytest.fixture
def clock(monkeypatch):
    """The seconds that time.monotonic says have passed: clock[0]."""
    seconds = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    monkeypatch.setattr(activity, "_state", activity._State())
    return seconds


def test_a_file_gets_a_line_per_minute_of_a_long_step(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "80")
    file = io.StringIO()
    display = ProgressDisplay(Console(file), STEPS)
    display.show(record(1))
    with activity.refreshing(lambda so_far: display.during_step(2, so_far)):
        for _ in activity.parts(range(100)):
            clock[0] += 2.5
    assert file.getvalue().splitlines()[1:] == [
        f"step      2/100000 ({so_far})  training loss 2.3457  lr 1.0e-03"
        for so_far in ("24%, 3:10 left", "48%, 2:10 left", "72%, 1:10 left", "96%, 0:10 left")
    ]


def test_a_file_gets_every_tenth_record_and_one_per_minute(clock):
    file = io.StringIO()
    display = ProgressDisplay(Console(file), STEPS)
    for number in range(21):
        display.show(record(number + 1))
        clock[0] += 25 if number < 10 else 0
    steps = [int(step) for step in re.findall(r"step +(\d+)/", file.getvalue())]
    assert steps == [1, 4, 7, 10, 11, 21]


def test_a_file_gets_a_line_per_minute_of_an_evaluation(clock):
    file = io.StringIO()
    with activity.showing_on(Console(file).activity), activity.doing("Evaluating", usual=True):
        for _ in activity.parts(range(130)):
            clock[0] += 1
    assert file.getvalue().splitlines() == [
        "Evaluating: 46%, 1:10 left ...",
        "Evaluating: 92%, 0:10 left ...",
    ]


PIECES = ["the cat ", "漢字", "é", "e\u0301", "\t", "\n", "on a very long mat", "."]


@pytest.mark.parametrize("columns", [40, 41])
def test_what_is_shown_behind_an_unfinished_text_leaves_no_trace(monkeypatch, clock, columns):
    terminals = [Terminal(monkeypatch, columns) for _ in range(2)]
    consoles = [Console(terminal) for terminal in terminals]
    random = np.random.default_rng(columns)
    seen = set()
    for piece in random.choice(PIECES, 60):
        for console in consoles:
            console.piece(piece)
        row = terminals[1].screen.cursor.y
        before = terminals[1].screen.display
        for so_far in ("3%, 0:41", "3%, 0:42"):
            clock[0] += 1
            consoles[0].activity(f"Generating: {so_far}", usual=True)
            shown = terminals[0].screen.display
            assert shown[:row] == before[:row] and shown[row + 1 :] == before[row + 1 :]
            assert shown[row].startswith(before[row].rstrip())
            seen.add(shown[row].removeprefix(before[row].rstrip()).strip())
    whole = {f"[Generating: 3%, 0:{second} ...]" for second in (41, 42)}
    assert whole | {"..."} <= seen
    consoles[0].activity(None, usual=False)
    assert terminals[0].lines() == terminals[1].lines()
    assert terminals[0].screen.cursor.x == terminals[1].screen.cursor.x


def test_a_text_that_goes_on_is_not_followed_by_anything(monkeypatch, clock):
    terminal = Terminal(monkeypatch, 80)
    console = Console(terminal)
    for _ in range(20):
        console.piece("a")
        clock[0] += 0.9
        console.activity("Generating: 3%, 0:41", usual=True)
        assert "Generating" not in terminal.lines()[0]


def test_a_line_is_cut_between_words():
    assert fit(("one two three", "one two"), 6) == "one"
    assert fit(("one two three", "one two"), 9) == "one two"


def test_compiling_is_shown_while_it_lasts(monkeypatch):
    terminal = Terminal(monkeypatch, 80)
    with activity.showing_on(Console(terminal).activity):
        with activity.expecting_kernels(30):
            activity.begin_compiling()
            activity.begin_compiling()
            (line,) = terminal.lines()
            assert re.fullmatch(
                r"Compiling kernels for this CPU, once: \d+ of about \d+ \.\.\.", line
            )
            activity.end_compiling()
            activity.end_compiling()
        assert terminal.lines() == []


def test_scripts_and_notebooks_show_compiling_and_progress_on_standard_error(monkeypatch):
    terminal = Terminal(monkeypatch, 80)
    monkeypatch.setattr("sys.stderr", terminal)
    activity.begin_compiling()
    assert terminal.lines()[0].startswith("Compiling kernels for this CPU, once: ")
    activity.end_compiling()
    assert terminal.lines() == []
    line = ProgressLine()
    line.progress.steps = STEPS
    for step in (1, 2):
        line.show(record(step))
    assert terminal.lines()[0].startswith("..........       2/100000  loss 2.3457")


def test_several_live_lines_are_replaced_and_give_way_to_what_stays(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "10")
    terminal = Recorded("utf-8", is_terminal=True)
    console = Console(terminal)
    console.live_lines(["1 of 3", "a\x1b[2J" + "b" * 100])
    console.live_lines(["2 of 3"])
    console.line("done")
    screen = pyte.Screen(40, 10)
    pyte.Stream(screen).feed(terminal.shown().replace("\n", "\r\n"))
    assert [line.rstrip() for line in screen.display if line.strip()] == ["done"]
    file = Recorded("utf-8")
    Console(file).live_lines(["1 of 3", "a"])
    assert file.shown() == ""  # a minute has not passed
