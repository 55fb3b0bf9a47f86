"""`smallmind plan`: the trials as they are made, the table, JSON, and what is refused."""

import json

import pytest

from smallmind.cli.plan import MINUTES
from smallmind.runs import planning
from tests.programs import CATS


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(planning, "MIN_STEPS", 3)
    monkeypatch.setattr(planning.budget, "speed_of", lambda *_: lambda _: 1e9)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(CATS * 10, encoding="utf-8")


def test_trials_and_a_table(cli):
    printed = cli("plan book.txt --minutes 2 --trials 0.2")
    lines = printed.out.splitlines()
    assert lines[0].startswith("book: 28,800 characters; 25,920 tokens to learn from, ")
    trials = [line for line in lines if line.startswith("Trial ")]
    assert trials and all(" of 9: 2 x " in line for line in trials)
    rows = [line.split()[0] for line in lines if line.lstrip()[:1].isdigit()]
    assert rows == [f"{minutes:g}" for minutes in sorted({2.0, *MINUTES})]
    assert "loss = " in printed.flat and f"From {len(trials)} outcomes" in printed.flat
    assert "Next: smallmind train book.txt --minutes 2" in printed.flat
    again = cli("plan book.txt --trials 0").out
    assert "Trial " not in again and f"Known from before: {len(trials)} trials, 0 runs" in again


def test_json_has_what_the_table_has(cli):
    found = json.loads(cli("plan book.txt --trials 0 --json").out)
    assert [row["minutes"] for row in found["minutes"]] == list(MINUTES)
    for row in found["minutes"]:
        low, high = row["interval"]
        assert low < row["loss"] < high and row["bytes"] > 10**6
        assert row["settings"]["n_embd"] >= 32 and row["parameters"] > 10_000
        for name in ("smaller", "larger"):
            assert row[name] is None or row[name] >= row["loss"]
    assert set(found["law"]) == {"E", "a", "alpha", "b", "beta", "R"} and found["outcomes"] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trials -1", "--trials -1 must be from 0 to the 60 minutes of a run"),
        ("--minutes 1 --trials 2", "--trials 2 must be from 0 to the 1 minutes of a run"),
        ("--trials nan", "--trials nan must be from 0"),
        ("--minutes -1", "minutes=-1.0 must be above 0"),
        ("--steps 100", "a plan is for runs of some minutes: leave out --steps"),
        ("--init-from runs/x", "a plan is for new models: leave out --init-from"),
        ("--recipe gpt2", "the recipe gpt2 does not choose a size"),
    ],
)
def test_what_makes_no_sense_is_refused(cli, flags, message):
    cli.refuses(message, "plan book.txt", flags)
