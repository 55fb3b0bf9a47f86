"""Plans: trials are made once, kept, and count together with the runs on the same text."""

import json

import numpy as np
import pytest

from smallmind import Run
from smallmind.runs import planning, trials
from smallmind.runs.planning import COUNT, Planner
from smallmind.runs.scaling import law_of
from smallmind.settings.sources import Choices
from tests.programs import refuses

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 500
MINUTES = 0.05


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Trials of a few steps, on a machine that is as fast as it is said to be."""
    monkeypatch.setattr(planning, "MIN_STEPS", 3)
    monkeypatch.setattr(planning.budget, "speed_of", lambda *_: lambda _: 1e9)


@pytest.fixture
def planner(tmp_path):
    def make(**given):
        return Planner(Choices(given, "modern"), TEXT, tmp_path)

    return make


def made(planner):
    return [planner.make(planned) for planned in planner.planned(MINUTES)]


def test_trials_are_made_once_and_kept(planner, tmp_path):
    first = planner()
    assert first.outcomes == []
    outcomes = [trial.outcome for trial in made(first)]
    assert 3 <= len(outcomes) <= COUNT and first.outcomes == outcomes
    sizes, lengths = ({x[i] for x in outcomes} for i in (0, 1))
    assert len(sizes) >= 2 and max(lengths) > 5 * min(lengths)
    again = planner()
    assert again.outcomes == outcomes and again.law.constants == first.law.constants
    assert len(made(again)) < len(outcomes)
    (path,) = tmp_path.glob("plans/*.jsonl")
    assert len(path.read_text().splitlines()) == len(again.outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {"plans"}


def test_trials_of_runs_that_learn_otherwise_tell_nothing(planner):
    made(planner())
    for other in ({"optimizer": "adamw"}, {"mlp": "gelu"}, {"tokenizer": "byte"}):
        assert planner(**other).outcomes == []
    assert planner(n_layer=2, seed=5, threads=1).outcomes


def test_a_trial_has_the_outcome_of_a_run(planner, tmp_path):
    made_by = planner(seed=3)
    planned = next(iter(made_by.planned(MINUTES)))
    outcome = made_by.make(planned).outcome
    fields = {name: getattr(planned.settings.model, name) for name in ("n_layer", "n_embd")}
    run = Run.create(planned.settings.replace(val_every=0), TEXT, out=tmp_path / "run")
    run.train(progress=False)
    assert run.final.loss == outcome.loss and fields["n_layer"] == run.settings.model.n_layer
    known = trials.of_runs(tmp_path, run.config.text_sha256, run.settings, made_by.unique)
    assert known == [outcome]
    assert planner(seed=3).runs == 1


@pytest.mark.parametrize("change", [{"target_loss": 9.0}, {"early_stopping_patience": 3}])
def test_runs_that_may_end_early_do_not_count(planner, tmp_path, change):
    planned = next(iter(planner().planned(MINUTES)))
    Run.create(planned.settings.replace(**change), TEXT, out=tmp_path / "run").train(progress=False)
    assert planner().runs == 0


def test_damaged_and_unknown_lines_are_left_out(planner, tmp_path):
    outcomes = [trial.outcome for trial in made(planner())]
    (path,) = tmp_path.glob("plans/*.jsonl")
    lines = path.read_text().splitlines()
    fields = json.loads(lines[0])
    others = [
        "{",
        "[" * 100_000,
        "7",
        json.dumps(fields | {"format": 99}),
        json.dumps(fields | {"loss": -1.0}),
        json.dumps(fields | {"tokens": "many"}),
        json.dumps({name: fields[name] for name in ("format", "kind")}),
        lines[1][:20],  # without a line break, as if the disk had become full
    ]
    path.write_text("\n".join([*lines, *others]), encoding="utf-8")
    again = planner()
    assert again.outcomes == outcomes
    planned = next(iter(again.planned(10 * MINUTES)))
    again.make(planned)
    assert len(planner().outcomes) == len(outcomes) + 1


def test_a_run_of_minutes_knows_the_trials(planner, tmp_path, monkeypatch):
    made(planner())
    given = []
    fit = planning.budget.fit
    monkeypatch.setattr(
        planning.budget, "fit", lambda *args: given.append(args[3]) or fit(*args[:3])
    )
    Run.create(text=TEXT, out=tmp_path / "run", minutes=0.01)
    assert given == [planner().outcomes]


def test_more_time_is_expected_to_help(planner):
    plan = planner()
    made(plan)
    best = [min(size.loss for size in plan.sizes(minutes)) for minutes in (0.1, 1, 10)]
    assert best == sorted(best, reverse=True)
    for size in plan.sizes(1):
        settings = plan.settings(size)
        assert settings.model.dropout == size.fields["dropout"]
        assert trials.outcome_of(settings, 1, 1.0).parameters == size.parameters
        assert law_of(plan.outcomes).loss(size.parameters, size.tokens, plan.unique) == size.loss


def test_what_cannot_be_planned_is_refused(tmp_path):
    for given, message in [
        ({"init_from": "runs/x"}, "a plan is for new models: leave out --init-from"),
        (dict.fromkeys(planning.CHOSEN, 8) | {"dropout": 0.1}, "leave out the size"),
    ]:
        refuses(message, Planner, Choices(given, "modern"), TEXT, tmp_path)
    refuses("recipe gpt2 does not choose", Planner, Choices({}, "gpt2"), TEXT, tmp_path)


def test_speeds_of_trials_correct_what_was_timed(planner, monkeypatch):
    plan = planner()
    monkeypatch.setattr(plan, "_speeds", {100_000: 5e8})
    assert np.isclose(plan._speed(100_000), 5e8) and np.isclose(plan._speed(10**6), 5e8)
