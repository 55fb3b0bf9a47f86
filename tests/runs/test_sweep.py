"""Plans of sweeps: their runs and names, how they grow, and files that hold none."""

import json

import pytest

from smallmind.runs.sweep import PLAN, SweepPlan, is_sweep, label
from tests.programs import refuses

VALUES = {"learning_rate": [1e-3, 3e-3], "n_embd": [64, 128], "steps": [10], "seed": [1, 2, 3]}


def test_a_plan_has_a_run_for_every_combination_named_by_what_differs():
    plan = SweepPlan.of(["/a.txt"], VALUES)
    names = [run.name for run in plan.runs]
    assert len(set(names)) == 12
    assert names[0] == "learning_rate=0.001,n_embd=64,seed=1"
    assert plan.varied == ["learning_rate", "n_embd", "seed"]
    assert all(run.settings["steps"] == 10 for run in plan.runs)
    assert label(plan.runs[-1].settings, ["n_embd"]) == "n_embd=128"


def test_a_plan_needs_more_than_one_run():
    refuses("--seeds 3", SweepPlan.of, [], {"steps": [10], "seed": [1, 1]})
    refuses("the limit is 10,000", SweepPlan.of, [], {"seed": range(200), "steps": range(200)})


def test_names_stay_apart_and_stay_in_their_folder():
    plan = SweepPlan.of([], {"teacher": ["../a", "..%a", "x" * 500], "seed": [1]})
    names = [run.name for run in plan.runs]
    assert len(set(names)) == 3 and all("/" not in name for name in names)
    assert max(map(len, names)) <= 100


def test_a_plan_is_read_as_it_was_written(tmp_path):
    plan = SweepPlan.of(["/täxt.txt"], {**VALUES, "size": ["nano", "tiny"], "bias": [True]})
    plan.save(tmp_path)
    assert is_sweep(tmp_path) and SweepPlan.read(tmp_path) == plan
    assert json.loads((tmp_path / PLAN).read_text(encoding="utf-8"))["format"] == 1


def test_more_values_extend_a_plan_whose_runs_keep_their_names():
    plan = SweepPlan.of([], {"n_embd": [64, 128], "seed": [1]})
    wider = SweepPlan.of([], {"n_embd": [32, 64, 128], "seed": [1, 2]})
    extended = plan.extended(wider)
    assert all(run in extended.runs for run in plan.runs)
    assert len({run.name for run in extended.runs}) == 6
    refuses("do not name, such as n_embd=32", wider.extended, plan)
    refuses("another text: the stories", plan.extended, SweepPlan(("/a.txt",), plan.runs))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": 1}',
        '{"format": "1", "text": [], "runs": []}',
        '{"format": 1, "text": [], "runs": []}',
        '{"format": 1, "text": [], "runs": [{"name": "../x", "settings": {}}]}',
        '{"format": 1, "text": [], "runs": [{"name": "x", "settings": {"a": [1]}}]}',
        '{"format": 1, "text": [1], "runs": [{"name": "x", "settings": {}}]}',
    ],
)
def test_a_file_that_holds_no_plan_is_refused(tmp_path, content):
    (tmp_path / PLAN).write_text(content)
    refuses("is not a valid plan of a sweep", SweepPlan.read, tmp_path)


def test_a_plan_of_a_newer_version_and_a_missing_one_are_refused(tmp_path):
    refuses("cannot read", SweepPlan.read, tmp_path)
    (tmp_path / PLAN).write_text('{"format": 2, "plan": {}}')
    refuses("update this one", SweepPlan.read, tmp_path)
