"""The table of `smallmind runs`: what it says, its order, its width, and JSON."""

import json
import os
import re

import pytest

from smallmind.cli.runs import COLUMNS, format_count
from smallmind.files.lock import RunLock
from tests.faults.test_consoles import Recorded
from tests.programs import flat
from tests.views.written import evaluation, final, finish, step, write

NAMES = ["done", "going", "killed", "broken", "young"]


@pytest.fixture
def runs(tmp_path):
    """Runs in every state, each created a second after the one before it."""
    parent = tmp_path / "runs"
    finish(write(parent / "done", step(100), evaluation(50, 2.0), final(100, 1.9)), 100)
    write(parent / "going", evaluation(1000, 1.5, bits=1.25), step(1250), steps=2000)
    write(parent / "killed", step(10), end='{"step": 2', n_layer=2)
    write(parent / "broken", step(7), {"step": 7, "failure": "the loss diverged"})
    for name, content in (("young", "{"), ("killed at its start", "")):
        (parent / name).mkdir()
        (parent / name / "metrics.jsonl").write_text(content)
    (parent / "notes").mkdir()
    (parent / "file").touch()
    for seconds, name in enumerate(NAMES[:-1]):
        os.utime(parent / name / "config.json", (10**9 + seconds, 10**9 + seconds))
    return parent


@pytest.fixture
def show(monkeypatch, cli):
    """The output of `smallmind runs`, at a given width."""

    def show(*arguments, columns=120):
        monkeypatch.setenv("COLUMNS", str(columns))
        return cli("runs", *arguments).out

    return show


def test_the_table_has_a_row_for_each_run(runs, show):
    with RunLock(runs / "going"):
        lines = show(runs).splitlines()
    assert re.split(" {2,}", lines[0].strip()) == [column.head for column in COLUMNS]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[2:7]}
    assert list(rows) == NAMES  # the newest last, then what has no config yet
    assert rows["done"] == "stories GPT-2 123K 100 2.0000 1.9000 1.250 0:10 finished"
    assert rows["going"].endswith(" 1,250/2,000 1.5000 - 1.250 2:05 running")
    assert rows["killed"].endswith(" 10/100 - - - 0:01 interrupted")
    assert rows["broken"].endswith(" failed")
    assert rows["young"] == "- - - 0 - - - 0:00 interrupted"
    notes = flat(" ".join(lines[7:]))
    assert "broken: the loss diverged" in notes and "young: config.json cannot be read" in notes


@pytest.mark.parametrize(
    ("column", "order"),
    [
        ("loss", ["going", "done", "broken", "killed", "young"]),
        ("steps", ["young", "broken", "killed", "done", "going"]),
        ("name", sorted(NAMES)),
        ("state", ["broken", "done", "going", "killed", "young"]),
    ],
)
def test_runs_are_sorted_by_a_column_and_those_without_a_value_come_last(runs, show, column, order):
    def names(*flags):
        return [row["name"] for row in json.loads(show(runs, "--json", "--sort", column, *flags))]

    assert set(names()) == set(NAMES)
    if column == "loss":
        assert names()[:2] == order[:2] and names("--reverse")[:2] == order[1::-1]
        assert set(names()[2:]) == set(names("--reverse")[2:])
    else:
        assert names() == order and names("--reverse") == order[::-1]


def test_json_has_the_numbers_themselves(runs, show):
    done, _, _, broken, young = json.loads(show(runs, "--json"))
    assert done == {
        "name": "done",
        "path": str(runs / "done"),
        "created": "2001-09-09T01:46:40+00:00",
        "state": "finished",
        "text": "stories",
        "architecture": "GPT-2",
        "parameters": 123456,
        "step": 100,
        "steps": 100,
        "best_loss": 2.0,
        "best_step": 50,
        "final_loss": 1.9,
        "bits_per_byte": 1.25,
        "seconds": 10.0,
        "failure": None,
        "problem": None,
    }
    assert broken["failure"] == "the loss diverged"
    assert young["created"] is None and young["best_loss"] is None


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_columns_go_where_the_terminal_is_too_narrow(runs, show, columns):
    printed = show(runs, columns=columns)
    assert max(map(len, printed.splitlines())) <= columns
    heads = re.split(" {2,}", printed.splitlines()[0].strip())
    assert {"name", "best held-out", "state"} <= set(heads)
    left_out = [column.head for column in COLUMNS if column.head not in heads]
    said = f"Columns hidden (terminal too narrow): {', '.join(left_out)}"
    assert (said in flat(printed)) == bool(left_out) == (columns < 100)


def test_columns_that_name_a_run_stay_longer_than_those_that_describe_it(runs, show):
    heads = show(runs, columns=70).splitlines()[0].split()
    assert {"name", "text", "model"} <= set(heads) and "parameters" not in heads


def test_a_long_name_is_shortened_only_if_nothing_else_helps(tmp_path, show):
    write(tmp_path / "runs" / ("2026-01-01-" + "long-" * 20 + "end"), step(1))
    assert "2026-01-01-" + "long-" * 20 + "end" in show(tmp_path / "runs", columns=200)
    row = show(tmp_path / "runs", columns=40).splitlines()[2]
    assert len(row) <= 40 and row.split()[0].startswith("2026-") and "...", row


@pytest.mark.parametrize(("encoding", "is_terminal"), [("ascii", False), ("utf-8", True)])
def test_the_table_prints_in_every_encoding(runs, cli, encoding, is_terminal):
    write(runs / "größe-漢", step(1))
    shown = cli.on(Recorded(encoding, is_terminal), "runs", runs)
    assert "finished" in shown and "interrupted" in shown


def test_a_run_itself_may_be_named(runs, show):
    assert [row["name"] for row in json.loads(show(runs / "done", "--json"))] == ["done"]


def test_no_run_is_said_and_no_directory_is_refused(tmp_path, show, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert flat(show("empty")) == "No runs in empty yet; `smallmind train` makes one"
    assert json.loads(show("empty", "--json")) == []
    cli.refuses("runs does not exist; `smallmind train` makes runs in runs/", "runs")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (999, "999"),
        (1000, "1K"),
        (113_344, "113K"),
        (999_900, "1M"),
        (4_846_592, "4.85M"),
        (124_000_000, "124M"),
        (1_500_000_000, "1.5B"),
    ],
)
def test_counts_are_brief(count, shown):
    assert format_count(count) == shown
