"""`smallmind plan`: the trials as they are made, the table, JSON, and what is refused."""

import json
import math
import re

import pytest

from smallmind.cli.plan import SHOWN_MINUTES
from smallmind.runs import planning, trials
from tests.programs import CATS, costs_at


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    for module in (planning, trials):
        monkeypatch.setattr(module, "MIN_STEPS", 3)
    monkeypatch.setattr(planning.budget, "costs_of", lambda *_: costs_at(1e9))
    monkeypatch.setattr(planning.budget, "corrected", lambda costs, _: costs)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(CATS * 10, encoding="utf-8")


def test_trials_and_a_table(cli):
    printed = cli("plan book.txt --minutes 2 --trials 0.2")
    lines = printed.out.splitlines()
    assert lines[0].startswith("book: 28,800 characters; 25,920 training tokens, ")
    trials = [line for line in lines if line.startswith("Trial ")]
    numbers = [int(line.split()[1].rstrip(":")) for line in trials]
    assert trials and numbers == list(range(1, len(trials) + 1))
    assert all(re.match(r"Trial \d+: \d x \d+, ", line) for line in trials)
    rows = [line.split()[0] for line in lines if line.lstrip()[:1].isdigit()]
    assert rows == [f"{minutes:g}" for minutes in sorted({2.0, *SHOWN_MINUTES})]
    assert "loss = " in printed.flat and f"Fitted to {len(trials)} outcomes" in printed.flat
    assert "Next: smallmind train book.txt --minutes 2" in printed.flat
    again = cli("plan book.txt --trials 0").out
    assert "Trial " not in again and f"Already available: {len(trials)} trials, 0 runs" in again


def test_json_has_what_the_table_has(cli):
    found = json.loads(cli("plan book.txt --trials 0 --json").out)
    assert [row["minutes"] for row in found["minutes"]] == list(SHOWN_MINUTES)
    for row in found["minutes"]:
        low, high = row["interval"]
        assert 0 < low < row["loss"] < high and row["bytes"] > 10**6
        assert row["settings"]["n_embd"] >= 32 and row["parameters"] > 10_000
        for name in ("smaller", "larger"):
            assert row[name] is None or row[name] >= row["loss"]
    assert set(found["law"]) == {"E", "a", "alpha", "b", "beta", "R"} and found["outcomes"] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trials -1", "--trials -1 must be from 0 to 60 minutes, the length of a run"),
        ("--minutes 1 --trials 2", "--trials 2 must be from 0 to 1 minute, the length of a run"),
        ("--trials nan", "--trials nan must be from 0"),
        ("--minutes -1", "minutes=-1.0 must be above 0"),
        ("--steps 100", "plans are for runs with --minutes: leave out --steps"),
        ("--init-from runs/x", "plans are for new models: leave out --init-from"),
        ("--recipe gpt2", "the recipe gpt2 does not choose a size"),
    ],
)
def test_what_makes_no_sense_is_refused(cli, flags, message):
    cli.refuses(message, "plan book.txt", flags)


def test_without_trials_the_table_says_what_it_is(cli):
    assert "these are guesses from other texts" in cli("plan book.txt --trials 0").flat
    printed = cli("plan book.txt --minutes 0.5 --trials 0.000001").flat
    assert "No trials:" in printed and "--trials" in printed


def test_a_text_that_is_too_short_for_trials_is_said_to_be(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "MIN_STEPS", 10_000)
    printed = cli("plan book.txt --minutes 2 --trials 2").flat
    assert "No trials: 64 passes over the text are fewer than 10000 steps" in printed
    assert "--trials" not in printed.partition("No trial")[2].partition("Next")[0]
    monkeypatch.setattr(planning, "MIN_STEPS", 200)
    printed = cli("plan book.txt --minutes 2 --trials 2 --batch-size 8192").flat
    assert "or smaller batches" in printed


def test_runs_of_few_steps_are_said_to_end_higher(cli):
    flags = "plan book.txt --trials 0 --batch-size"
    assert "higher loss" not in cli(flags, "8").flat
    assert "has only 0 steps here: with fewer than" in cli(flags, "8192 --minutes 0.05").flat


def test_no_loss_is_above_that_of_a_guess(cli):
    found = json.loads(cli("plan book.txt --trials 0 --minutes 0.000001 --json").out)
    guess = math.log(len(set(CATS)))
    for row in found["minutes"]:
        low, high = row["interval"]
        assert low <= row["loss"] <= high <= guess * (1 + 1e-9)


def test_trials_that_cannot_be_kept_are_said_once(cli, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "plans").touch()
    printed = cli("plan book.txt --minutes 2 --trials 0.2").flat
    assert printed.count("Trial ") > 1 and printed.count("cannot be saved") == 1


def test_the_next_command_has_the_same_flags(cli, tmp_path):
    (tmp_path / "own.toml").write_text('[run]\ntext = "book.txt"\n')
    for flags in ("--optimizer adamw --tokenizer byte", "--seed 3 --no-qk-norm"):
        printed = cli("plan book.txt --minutes 7 --trials 0", flags).flat.replace(" \\", "")
        following = printed.split("Next: ")[1]
        assert following.startswith("smallmind train book.txt ") and "--minutes 7" in following
        for flag in flags.split(" --"):
            assert flag.removeprefix("--") in following
    printed = cli("plan --config own.toml --trials 0").flat.replace(" \\", "")
    assert "Next: smallmind train book.txt --config own.toml --minutes 60" in printed


def test_plans_lie_beside_the_runs(cli, tmp_path):
    cli("plan book.txt --minutes 2 --trials 0.2 --out models/a")
    assert list(tmp_path.glob("models/plans/*.jsonl")) and not (tmp_path / "runs").exists()


def test_a_model_that_does_not_fit_is_refused_first(cli, monkeypatch):
    monkeypatch.setattr("smallmind.memory.available.available_bytes", lambda: 10_000)
    cli.refuses("of memory", "plan book.txt --trials 0 --n-embd 64")
