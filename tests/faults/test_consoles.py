"""Limited consoles, closed outputs and a clock that jumps: readable output, no exception."""

import io
import itertools
import os
import shutil
import subprocess
import sys
import time

import pytest

from smallmind.cli import main
from smallmind.cli.console import Console
from tests.faults.runs import FLAGS, status, train
from tests.programs import last_of_each

TEXT = "αβγ δεζ 漢字 \U0001f600 é\x1b\x07 the cat.\n" * 100
NARROW = os.terminal_size((0, 0))


class Recorded(io.TextIOWrapper):
    """A stream in some encoding, as strict as a console's, and a terminal if asked for."""

    def __init__(self, encoding, is_terminal=False):
        super().__init__(io.BytesIO(), encoding, newline="")
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal

    def shown(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("consoles")
    (root / "greek.txt").write_text(TEXT, encoding="utf-8")
    flags = last_of_each(
        str(root / "greek.txt"), *FLAGS, "--steps", "8", "--out", str(root / "run")
    )
    assert main(["train", *flags]) == 0
    return root / "run"


@pytest.mark.parametrize(
    ("encoding", "is_terminal"),
    [
        pytest.param("cp1252", False, marks=pytest.mark.slow),
        ("cp437", True),
        ("ascii", False),
        pytest.param("ascii", True, marks=pytest.mark.slow),
        pytest.param("utf-8", True, marks=pytest.mark.slow),
        ("utf-16", False),
    ],
)
def test_every_command_works_in_every_encoding(run, tmp_path, monkeypatch, encoding, is_terminal):
    monkeypatch.setattr("os.get_terminal_size", lambda *_: NARROW)
    monkeypatch.setenv("COLUMNS", "0")
    text = str(run.parent / "greek.txt")
    health = ["--check-gradient-health", "--diagnostic-interval", "4", "--profile-wide"]
    small = last_of_each(*FLAGS, "--steps", "8")
    for arguments, words in [
        (["train", text, *small, *health, "--out", str(tmp_path / "run")], "Sample:"),
        (["train", "--resume", str(run)], "is finished: 8 steps"),
        (["generate", str(run), "--prompt", "the 漢", "--max-tokens", "50"], "the "),
        (["evaluate", str(run)], "perplexity"),
        (["verify", str(run)], "checks passed"),
        (["schedule"], "one-cycle"),
        (["estimate", "--memory", "1TB"], "Fits"),
        (["export-metrics", str(run)], "step,loss"),
        (["runs", str(run.parent)], "finished"),
        (["compare", str(run), str(tmp_path / "run")], "All settings are the same"),
        (["plot", str(run), str(tmp_path / "run")], "Gradient norm"),
    ]:
        stream = Recorded(encoding, is_terminal)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert main(arguments) == 0
        shown = stream.shown().replace("\x1b[K", "")  # with which the live line is cleared
        assert words in shown, arguments
        if is_terminal:
            assert "\x1b" not in shown and "\x07" not in shown


@pytest.mark.parametrize("command", ["", "train", "check", "generate", "verify", "schedule"])
def test_help_and_errors_are_plain(command, monkeypatch):
    stream = Recorded("ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert status(*command.split(), "--help") == 0
    assert "usage: smallmind" in stream.shown()


def test_a_line_is_no_wider_than_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    for columns, expected in [(80, 79), (10, 9), (1, 1), (0, 79)]:
        size = os.terminal_size((columns, 24 if columns else 0))
        monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setattr("os.get_terminal_size", lambda *_, size=size: size)
        assert shutil.get_terminal_size().columns == (columns or 80)
        stream = Recorded("utf-8", is_terminal=True)
        console = Console(stream)
        console.live("x" * 200)
        console.quote("word " * 50)
        console.live("y")
        console.line("end")
        assert stream.shown().split("\r")[1].rstrip(" ") == "x" * expected
        assert stream.shown().endswith("end\n")


def test_a_closed_output_is_no_error(run, tmp_path):
    for stream in ("stdout", "stderr"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, stream, None)
            assert status("evaluate", run) == 0
            assert status("evaluate", tmp_path / "none") == 2


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_an_output_closed_by_the_shell_is_no_error(tmp_path, closed):
    command = f'"{sys.executable}" -m smallmind schedule {closed}'
    result = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The file that a run leaves by an ordinary clock."""
    root = tmp_path_factory.mktemp("weights")
    assert train(root) == 0
    return (root / "run" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("clock", ["stops", "jumps", "runs backwards"])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, weights, clock):
    number = itertools.count()
    reading = {
        "stops": lambda: 5.0,
        "jumps": lambda: next(number) * (-1.0) ** next(number) * 1e12,
        "runs backwards": lambda: -1.0 * next(number),
    }[clock]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(1e9 * reading()))
    monkeypatch.setattr(time, "time", reading)
    stream = Recorded("utf-8", is_terminal=True)
    monkeypatch.setattr(sys, "stdout", stream)
    assert train(tmp_path, "--profile") == 0
    assert "step 20/20" in stream.shown() and "nan" not in stream.shown()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
