"""The results of a sweep: means and spreads over seeds, and runs that failed or are missing."""

import csv
import json

import pytest

from smallmind.runs.sweep import SweepPlan
from smallmind.views.sweep import groups_of, measure_of, result_of, save
from tests.views.written import evaluation, final, finish, step, write

LOSSES = {64: (2.0, 2.2), 128: (1.5, 1.9)}


@pytest.fixture
def plan():
    return SweepPlan.of([], {"n_embd": [64, 128, 256], "seed": [1, 2]})


@pytest.fixture
def results(tmp_path, plan):
    for run in plan.runs[:4]:
        loss = LOSSES[run.settings["n_embd"]][run.settings["seed"] - 1]
        records = step(100), evaluation(50, loss - 0.1), final(100, loss)
        finish(write(tmp_path / run.name, *records), 100)
    write(tmp_path / plan.runs[4].name, step(7), {"step": 7, "failure": "the loss diverged"})
    log = "smallmind: warning: slow\nsmallmind: not enough memory: use --size nano\n"
    (tmp_path / f"{plan.runs[5].name}.log").write_text(log)
    return [result_of(tmp_path, run) for run in plan.runs]


def test_the_lowest_mean_comes_first_and_failed_runs_last(plan, results):
    first, second, failed = groups_of(plan, results)
    assert [x.settings["n_embd"] for x in (first, second, failed)] == [128, 64, 256]
    assert first.mean == pytest.approx(1.7)
    assert first.spread == pytest.approx(0.4 / 2**0.5)  # of a sample
    assert first.seconds == 10.0
    assert failed.mean is None and failed.spread is None
    errors = [each.error for each in failed.results]
    assert errors == ["the loss diverged", "not enough memory: use --size nano"]
    # The second may do better with more memory; the first would fail again.
    assert [each.is_over for each in results] == [True] * 5 + [False]


def test_an_interrupted_run_has_no_loss_yet_and_no_error(tmp_path, plan):
    write(tmp_path / plan.runs[0].name, step(50), evaluation(50, 2.0))
    (tmp_path / f"{plan.runs[0].name}.log").write_text("smallmind: interrupted\n")
    result = result_of(tmp_path, plan.runs[0])
    assert (result.state, result.loss, result.best_loss) == ("interrupted", None, 2.0)
    assert result.error is None and not result.is_over


def test_a_loss_that_is_not_finite_is_an_error(tmp_path, plan):
    finish(write(tmp_path / plan.runs[0].name, step(100), final(100, float("nan"))), 100)
    result = result_of(tmp_path, plan.runs[0])
    assert result.loss is None and result.error and result.is_over


def test_runs_whose_tokens_may_differ_are_compared_by_bits_per_byte(plan):
    assert measure_of(plan) == "loss"
    assert measure_of(SweepPlan.of([], {"tokenizer": ["char", "byte"]})) == "bits_per_byte"


def test_the_files_have_every_run_and_every_group(tmp_path, plan, results):
    save(tmp_path, plan, results)
    with open(tmp_path / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["n_embd"] for row in rows] == ["64", "64", "128", "128", "256", "256"]
    assert rows[0]["loss"] == "2.0" and rows[4]["error"] == "the loss diverged"
    saved = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert saved["unit"] == "nats per token" and len(saved["runs"]) == 6
    assert saved["groups"][0]["mean"] == pytest.approx(1.7) and saved["groups"][0]["ended"] == 2
