"""Plans: trials are made once, kept, and count together with the runs on the same text."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import llvmlite.binding
import pytest

from smallmind import Run
from smallmind.forecast.budget import corrected
from smallmind.forecast.law import Outcome, Trial
from smallmind.runs import planning, trials
from smallmind.runs.creating import prepare
from smallmind.runs.planning import MAX_TRIALS, Planner
from smallmind.runs.trials import History
from smallmind.settings.rules import Choices
from tests.programs import costs_at, refuses, start_untimed, status

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 500
MINUTES = 0.3


def make_quick(patch):
    """Trials have a few steps, on a machine that is as fast as it is said to be."""
    for module in (planning, trials):
        patch.setattr(module, "MIN_STEPS", 3)
    patch.setattr(planning.budget, "costs_of", lambda *_: costs_at(1e9))
    patch.setattr(planning.budget, "corrected", lambda costs, _: costs)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.fixture
def planner(tmp_path):
    def make(**given):
        return Planner(Choices(given, "modern"), TEXT, tmp_path)

    return make


def made(planner):
    return [planner.make(planned) for planned in planner.planned(MINUTES)]


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """The directory of the plans where all trials have been made."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        start_untimed(patch)
        make_quick(patch)
        made(Planner(Choices({}, "modern"), TEXT, root))
    return root / "plans"


@pytest.fixture
def tried(planner, plans, tmp_path):
    """Makes planners where all trials have been made."""
    shutil.copytree(plans, tmp_path / "plans")
    return planner


def test_trials_are_made_once_and_kept(planner, tmp_path):
    first = planner()
    assert first.outcomes == []
    outcomes = [trial.outcome for trial in made(first)]
    assert 3 <= len(outcomes) <= MAX_TRIALS and first.outcomes == outcomes
    sizes, lengths = ({x[i] for x in outcomes} for i in (0, 1))
    assert len(sizes) >= 2 and max(lengths) > 5 * min(lengths)
    again = planner()
    assert again.outcomes == outcomes and again.law(1).constants == first.law(1).constants
    assert len(made(again)) < len(outcomes)
    (path,) = tmp_path.glob("plans/*.jsonl")
    assert len(path.read_text().splitlines()) == len(again.outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {"plans"}


def test_trials_of_runs_that_learn_otherwise_tell_nothing(tried):
    for other in ({"optimizer": "adamw"}, {"mlp": "gelu"}, {"tokenizer": "byte"}):
        assert tried(**other).outcomes == []
    assert tried(n_layer=2, seed=5, threads=1).outcomes


def test_a_trial_has_the_outcome_of_a_run(planner, tmp_path):
    made_by = planner(seed=3)
    planned = next(iter(made_by.planned(MINUTES)))
    outcome = made_by.make(planned).outcome
    fields = {name: getattr(planned.settings.model, name) for name in ("n_layer", "n_embd")}
    run = Run.create(planned.settings.replace(val_every=0), TEXT, out=tmp_path / "run")
    run.train(progress=False)
    assert run.final.loss == outcome.loss and fields["n_layer"] == run.settings.model.n_layer
    again = planner(seed=3)
    assert again.runs == 1 and again.outcomes == [outcome, outcome]


@pytest.mark.parametrize("change", [{"target_loss": 9.0}, {"early_stopping_patience": 3}])
def test_runs_that_may_end_early_do_not_count(planner, tmp_path, change):
    planned = next(iter(planner().planned(MINUTES)))
    Run.create(planned.settings.replace(**change), TEXT, out=tmp_path / "run").train(progress=False)
    assert planner().runs == 0


def test_damaged_and_unknown_lines_are_left_out(tried, tmp_path):
    planner, outcomes = tried, tried().outcomes
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


def test_a_run_of_minutes_knows_the_trials(tried, tmp_path, monkeypatch):
    given, timed, fit = [], [], planning.budget.fit

    def noted(*arguments):
        given.append(arguments[3])
        timed.append(arguments[4])
        return fit(*arguments)

    monkeypatch.setattr(planning.budget, "fit", noted)
    Run.create(text=TEXT, out=tmp_path / "run", minutes=0.01)
    assert given == [tried().outcomes]
    assert timed == [tried().history.timed()] and len(timed[0]) >= 2


def test_more_time_is_expected_to_help(tried):
    plan = tried()
    best = [min(size.loss for size in plan.sizes(minutes)) for minutes in (0.1, 1, 10)]
    assert best == sorted(best, reverse=True)
    for size in plan.sizes(1):
        settings = plan.settings(size)
        assert settings.model.dropout == size.fields["dropout"]
        assert trials.outcome_of(settings, 1, 1.0).parameters == size.parameters
        assert plan.law(1).loss(size.parameters, size.tokens, plan.unique) == size.loss


def test_what_cannot_be_planned_is_refused(tmp_path):
    for given, message in [
        ({"init_from": "runs/x"}, "plans are for new models: leave out --init-from"),
        (dict.fromkeys(planning.FITTED_FIELDS, 8) | {"dropout": 0.1}, "leave out the size"),
    ]:
        refuses(message, Planner, Choices(given, "modern"), TEXT, tmp_path)
    refuses("recipe gpt2 does not choose", Planner, Choices({}, "gpt2"), TEXT, tmp_path)
    refuses("leave out the config.json", Planner, Choices({}, None), TEXT, tmp_path)
    refuses("recipe='foo' must be one of", Planner, Choices({}, "foo"), TEXT, tmp_path)
    for given in ({"teacher": "x"}, {"target_loss": 2.0}, {"freeze": "head"}, {"chat": True}):
        name = next(iter(given)).replace("_", "-")
        refuses(f"do not support --{name}", Planner, Choices(given, "modern"), TEXT, tmp_path)
    plateau = Choices({"schedule": "plateau"}, "modern")
    refuses("do not support --schedule plateau", Planner, plateau, TEXT, tmp_path)


def test_the_time_of_another_machine_does_not_count(tried, monkeypatch):
    planner = tried
    assert planner().history.timed()
    for given in (
        {"precision": "float32"},
        {"block_size": 16},
        {"micro_batch_size": 1},
        {"threads": 2},
    ):
        assert planner(**given).history.outcomes() and not planner(**given).history.timed(), given
    for owner, name, other in (
        (llvmlite.binding, "get_host_cpu_name", lambda: "z80"),
        (trials, "choose_threads", lambda _: 64),
        (trials, "__version__", "0.1.9"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            assert planner().history.outcomes() and not planner().history.timed(), name
    assert planner().history.timed()


CHANGES = [
    {"momentum": 0.9},
    {"beta1": 0.8},
    {"dropout": 0.5},
    {"weight_decay": 0.1},
    {"schedule": "constant"},
    {"matrix_learning_rate": 0.01},
]


def test_trials_of_other_settings_are_others(tried):
    assert tried().outcomes
    for change in CHANGES:
        assert tried(**change).outcomes == [], change


@pytest.mark.parametrize("change", [{"dropout": 0.5}, {"weight_decay": 0.02}])
def test_runs_with_other_regularization_do_not_count(planner, tmp_path, change):
    planned = next(iter(planner().planned(MINUTES)))
    run = Run.create(planned.settings.replace(**change), TEXT, out=tmp_path / "run")
    run.train(progress=False)
    assert planner().runs == 0 and planner(**change).runs == 1


@pytest.mark.parametrize("unique", [10**3, 10**6])
def test_runs_with_the_regularization_of_the_recipe_count(planner, tmp_path, monkeypatch, unique):
    """The decay that it has beside dropout, and the one it has without."""
    plan = planner()
    planned = next(iter(plan.planned(MINUTES)))
    outcome = trials.outcome_of(planned.settings, unique, 1.0)
    usual = trials.regularization(*outcome[:3])
    assert bool(usual["dropout"]) == (unique == 10**3)
    run = Run.create(planned.settings.replace(**usual), TEXT, out=tmp_path / "run")
    run.train(progress=False)
    monkeypatch.setattr(plan.history, "unique", unique)
    assert len(plan.history.runs()) == 1


def test_runs_that_were_made_longer_or_are_short_do_not_count(planner, tmp_path, monkeypatch):
    planned = next(iter(planner().planned(MINUTES)))
    run = Run.create(planned.settings, TEXT, out=tmp_path / "run")
    run.train(progress=False)
    steps = run.settings.training.steps
    assert planner().runs == 1
    monkeypatch.setattr(trials, "MIN_STEPS", steps + 1)
    assert planner().runs == 0
    monkeypatch.setattr(trials, "MIN_STEPS", 3)
    Run.open(run.path).resume(progress=False, steps=steps + 5)
    assert planner().runs == 0


def test_tokens_on_disk_have_plans_too(planner, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    words = "--tokenizer", "bpe", "--vocab-size", "300"
    assert status("prepare", tmp_path / "text.txt", "--out", tmp_path / "tokens", *words) == 0
    source = str(tmp_path / "tokens")
    plan = Planner(Choices({}, "modern"), source, tmp_path / "runs")
    plan.make(next(iter(plan.planned(MINUTES))))
    choices = Choices({"minutes": 0.01, "text": [source]}, "modern")
    known = []
    patch = pytest.MonkeyPatch()
    patch.setattr(planning.budget, "fit", lambda *given: known.extend(given[3]) or {})
    try:
        prepare(choices, cache=tmp_path / "runs" / "tokens")
    finally:
        patch.undo()
    assert known == plan.outcomes


def test_what_tokens_say_of_their_text_leads_nowhere(planner, tmp_path):
    for digest in ("../../elsewhere", "/tmp/elsewhere", "\0", "a" * 10_000, "\ud800"):
        own = planner()
        history = History([tmp_path], digest, own.prepared.settings, own.prepared.tokenizer, 9)
        assert history.files[0].parent == tmp_path / "plans"
        assert len(history.files[0].name) < 50


def test_trials_of_two_processes_are_all_kept(planner, tmp_path):
    trial = Trial(Outcome(1e5, 1e6, 1e5, 2.0), 1.0)
    histories = [planner().history, planner().history]
    with ThreadPoolExecutor(2) as pool:
        for history in histories:
            for _ in range(20):
                pool.submit(history.add, trial)
    assert len(histories[0].outcomes()) == 40


def test_a_disk_that_is_full_loses_no_trial(planner, tmp_path):
    (tmp_path / "plans").write_text("a file where the directory would be")
    plan = planner()
    made(plan)
    assert plan.outcomes and "plans" in str(plan.unkept)


def test_accumulated_windows_count(planner):
    plain, accumulated = planner(), planner(grad_accum_steps=4)
    for one, other in zip(plain.sizes(1), accumulated.sizes(1), strict=True):
        assert other.tokens == pytest.approx(one.tokens, rel=0.3)
        batches = [x.fields["batch_size"] * x.fields["block_size"] for x in (one, other)]
        assert 0.5 < 4 * batches[1] / batches[0] < 2.1
    planned = next(iter(accumulated.planned(MINUTES)))
    trial = accumulated.make(planned)
    settings = planned.settings
    tokens = settings.training.steps * 4 * settings.run.batch_size * settings.model.block_size
    assert trial.outcome.tokens == tokens


def test_the_time_of_trials_counts(planner, monkeypatch):
    plan = planner()
    monkeypatch.setattr(planning.budget, "corrected", corrected)
    before = [size.tokens for size in plan.sizes(0.1)]
    planned = next(iter(plan.planned(MINUTES)))
    monkeypatch.setattr(
        trials, "train", lambda *_: Trial(trials.outcome_of(planned.settings, 10**6, 2.0), 1e6)
    )
    plan.make(planned)
    assert max(size.tokens for size in plan.sizes(0.1)) < min(before)
    assert max(size.tokens for size in planner().sizes(0.1)) < min(before)


def test_trials_are_kept_with_their_batch(tried, tmp_path):
    planner = tried
    made(planner(batch_size=1))
    timed = planner().history.timed()
    batches = {trial.batch for trial in timed}
    assert len(batches) >= 2 and min(batches) < 768
    (path,) = tmp_path.glob("plans/*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, batch in zip(lines, (0, None, "x", -1, 1e12), strict=False):
        line["batch"] = batch
    del lines[0]["batch"]  # as earlier versions wrote it
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unknown = [trial._replace(batch=None) for trial in timed[:2]]
    assert planner().history.timed() == [*unknown, *timed[5:]]
