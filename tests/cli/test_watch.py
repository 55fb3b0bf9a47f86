"""Watching a run: at any width, in any console, while it trains and afterwards."""

import json

import pytest

from smallmind.cli import watch
from smallmind.cli.console import Console
from smallmind.views.run_view import RunView, State
from tests.cli.test_live_line import Terminal


@pytest.fixture
def run(tmp_path):
    """A run of 200 logged steps, with evaluations, a problem and samples."""
    path = tmp_path / "runs" / "novel"
    path.mkdir(parents=True)
    lines = []
    for step in range(1, 201):
        record = {"step": step, "loss": 4 - step / 100, "lr": 1e-3, "grad_norm": 1.0}
        record |= {"tokens_per_second": 12_345.0, "elapsed_seconds": 0.5 * step}
        lines.append({**record, "step_ms": 500.0, "peak_memory": 180_000_000})
        if step % 50 == 0:
            lines.append({"step": step, "train_loss": 3.0, "val_loss": 4.25 - step / 100})
    lines.append({"step": 200, "warning": "the disk is nearly full"})
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 201, "lo'
    (path / "metrics.jsonl").write_text(text)
    (path / "samples.txt").write_text("--- step 100\nearly\n--- step 150\nIt was a \x1b[2Jnight.\n")
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_once_shows_everything_within_the_width(run, columns, encoding, monkeypatch, cli):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(type(__import__("sys").stdout), "encoding", encoding, raising=False)
    printed = cli("watch", run, "--once")
    assert all(len(line) <= columns for line in printed.out.splitlines())
    losses = "training loss 2.0000", "held-out loss 2.2500"
    for part in ("novel: interrupted", "step 200", *losses, "12,345"):
        assert part in printed.flat
    assert "the disk is nearly full" in printed.flat
    assert "Sample after step 150: It was a" in printed.flat


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_number_stays_with_its_name_and_unit(run, columns):
    numbers = watch._numbers(RunView(run, watch.FIELDS))
    lines = watch._packed(numbers, columns)
    assert " ".join(" ".join(lines).split()) == " ".join(numbers)
    whole = [number for number in numbers if len(number) <= columns - 2]
    assert len(whole) >= 3 - (columns == 20)
    assert all(any(part in line for line in lines) for part in whole)
    assert columns == 20 or max(map(len, lines)) <= columns


def test_numbers_that_no_run_writes_are_left_out(run, cli):
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n")
        for value in ("high", None, [1], float("nan"), float("inf"), -1e308, 10**400):
            names = "loss", "lr", "tokens_per_second", "peak_memory", "val_loss", "elapsed_seconds"
            file.write(json.dumps({"step": 300, **dict.fromkeys(names, value)}) + "\n")
        file.write(json.dumps({"step": 301, "failure": "the loss diverged"}) + "\n")
    shown = cli("watch", run, "--once").out
    assert shown.count("the loss diverged") == 1 and "novel: failed" in shown


def test_the_newest_run_is_watched_and_a_run_without_metrics_too(run, monkeypatch, cli):
    monkeypatch.chdir(run.parents[1])
    (run / "config.json").write_text("{}")
    assert "novel" in cli("watch --once").out
    (run / "metrics.jsonl").write_text("")
    assert "Nothing logged yet." in cli("watch", run).out
    cli("watch", run.parent, ends=2)


def test_the_screen_is_redrawn_at_any_size_until_the_run_ends(run, monkeypatch):
    terminal = Terminal(monkeypatch, 80)
    sizes, shown, written = [80, 50, 40, 120], [], []

    def look(_seconds):
        if _seconds >= watch.LOOK_SECONDS:
            shown.append(terminal.lines())
            terminal.resize(sizes[len(shown) % len(sizes)])
            with open(run / "metrics.jsonl", "a") as file:
                file.write(f'ss": 1}}\n{{"step": {200 + len(shown)}, "loss": 1.5, "lr": 1}}\n{{"')

    monkeypatch.setattr("time.sleep", look)
    state = property(lambda _: State.FINISHED if len(shown) >= 5 else State.RUNNING)
    monkeypatch.setattr(RunView, "state", state)
    write = terminal.write
    monkeypatch.setattr(terminal, "write", lambda text: (written.append(text), write(text))[1])
    view = RunView(run, watch.FIELDS)
    watch._watch_terminal(view, Console(terminal))
    assert len(shown) == 5
    for lines in shown:
        assert lines[0].startswith("novel: running") and len(lines) <= 24
    assert "step 204" in " ".join(shown[-1])
    everything = "".join(written)
    assert everything.startswith("\x1b[?1049h\x1b[?25l") and everything.endswith("\x1b[?1049l")
    assert "\x1b[2J" not in everything  # of the sample


def test_ctrl_c_ends_only_the_watching(run, monkeypatch, cli):
    monkeypatch.setattr(RunView, "state", property(lambda _: State.RUNNING))

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    assert "step 200" in cli("watch", run).out
    assert before == {path: path.stat().st_mtime_ns for path in run.iterdir()}
