"""The tables of `smallmind compare`."""

import pytest

from tests.faults.test_consoles import Recorded
from tests.programs import flat
from tests.views.written import evaluation, step, write


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("slow", "fast", "other")):
        records = [x for n in (10, 20, 30) for x in (step(n), evaluation(n, (5 - number) / n))]
        write(tmp_path / name, *records, learning_rate=1e-3 * 2**number, qk_norm=number == 2)
    return tmp_path


@pytest.fixture
def show(monkeypatch, cli):
    """The output of `smallmind compare`, at a given width."""

    def show(*arguments, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        return cli("compare", *arguments).out

    return show


def rows_below(printed, title):
    """The rows of the table under a title, by their first cell."""
    lines = printed[printed.index(title) :].splitlines()[3:]
    rows = [line.split() for line in lines[: lines.index("") if "" in lines else None]]
    return {row[0]: row[1:] for row in rows}


def test_settings_and_losses_stand_side_by_side(runs, show):
    printed = show("slow", "fast")
    assert "A slow" in printed and "B fast" in printed and "interrupted" in printed
    differing = rows_below(printed, "Settings that differ")
    assert differing == {"learning_rate": ["0.001", "0.002"]}
    losses = rows_below(printed, "Held-out loss, nats per token, at equal steps")
    assert losses == {
        "10": ["0.5000", "*0.4000"],
        "20": ["0.2500", "*0.2000"],
        "30": ["0.1667", "*0.1333"],
    }
    times = rows_below(printed, "at equal times")
    assert list(times) == ["1.0", "1.4", "1.8", "2.2", "2.6", "3.0"]
    assert times["3.0"] == ["s", "0.1667", "*0.1333"]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_tables_that_are_too_wide_come_in_parts(runs, show, columns):
    write(runs / "long", step(1), tokenizer="byte", text="a-very-long-name-" * 3)
    printed = show("slow", "fast", "other", "long", columns=columns)
    assert max(map(len, printed.splitlines())) <= columns
    settings = printed[printed.index("Settings that differ") :].split("\n\n")[0]
    assert settings.count("setting ") == {40: 2, 80: 1, 200: 1}[columns]
    for words in ("0.002", "0.004", "a-very-lon", "byte", "D"):
        assert words in settings


def test_equal_runs_and_runs_without_losses_are_said(runs, show):
    write(runs / "begun")
    assert "All settings are the same" in show("begun", "begun/../begun")
    printed = flat(show("begun", "slow"))
    assert "Training loss, smoothed, nats per token: the runs have no steps in common" in printed


def test_runs_that_were_evaluated_at_other_steps_are_compared_by_training_loss(runs, show):
    losses = [step(n, 5.0 - n / 10) for n in range(1, 11)]
    write(runs / "early", *losses[:5], evaluation(5, 3.0), *losses[5:])
    printed = show("slow", "early")
    assert "Held-out loss, nats per token: the runs have no steps in common\n" in printed
    lowest = rows_below(printed, "Best held-out loss, nats per token")
    assert lowest["loss"] == ["*0.1667", "3.0000"] and lowest["steps"] == ["30", "5"]
    assert lowest["time"] == ["3.0", "s", "0.5", "s"]
    below = rows_below(printed, "Training loss, smoothed, nats per token, at equal steps")
    assert list(below) == ["10"]


def test_runs_of_other_tokens_that_never_met_are_compared_by_their_lowest_losses(runs, show):
    write(runs / "bytes", evaluation(40, 1.0, bits=2.5), tokenizer="byte")
    write(runs / "more", evaluation(50, 1.0, bits=2.25), evaluation(60, 1.5, bits=2.75))
    printed = show("bytes", "more", columns=80)
    lowest = rows_below(printed, "Best held-out loss, bits per byte")
    assert lowest["loss"] == ["2.5000", "*2.2500"] and lowest["steps"] == ["40", "50"]


def test_other_texts_and_other_tokens_are_said(runs, show):
    write(runs / "text", evaluation(10, 1.0), evaluation(30, 1.0), saved={"text_sha256": "1"})
    assert "The texts differ" in show("slow", "text")
    write(runs / "bytes", evaluation(10, 1.0), evaluation(30, 1.0), tokenizer="byte")
    printed = show("slow", "bytes")
    assert "Held-out loss, bits per byte, at equal steps" in printed and "texts" not in printed


def test_every_encoding_will_do(runs, cli):
    write(runs / "größe", step(1), text="größe.txt")
    assert "gr??e" in cli.on(Recorded("ascii"), "compare slow größe")


def test_what_cannot_be_compared_is_refused(runs, cli):
    few = "name two runs or more: smallmind compare RUN RUN"
    for arguments, message in [
        ("", few),
        ("slow", few),
        ("slow slow", few),
        ("slow none", "none is not a directory"),
        ("slow .", ". is not a run"),
        ([f"r{i}" for i in range(53)], "53 runs are too many to tell apart: name at most 52"),
    ]:
        cli.refuses(message, "compare", arguments)
