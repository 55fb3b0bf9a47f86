"""Runs by minutes: their length is fitted to the time as they go, on a clock that the tests set."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from smallmind import Run, TrainingConfig
from smallmind.files import durable
from smallmind.forecast import pace
from smallmind.forecast.pace import Pace
from smallmind.optim.schedule import schedule
from smallmind.runs import session
from smallmind.settings.config import SCHEDULES
from smallmind.settings.sources import read_settings
from smallmind.training import clock
from smallmind.training.records import StepRecord
from tests.programs import refuses
from tests.runs import small
from tests.runs.small import TEXT, create

FIELDS = {**small.FIELDS, "steps": 6, "log_every": 10, "val_every": 40, "save_every": 30}
del FIELDS["steps"], FIELDS["warmup_steps"]
MINUTE = 60.0


class Clock:
    """A clock that stands still but for steps, which take as long as `seconds` says of each."""

    def __init__(self, monkeypatch, seconds, planned):
        self.now, self.seconds, self.spent = 0.0, seconds, []
        for module in (pace, session, clock):
            monkeypatch.setattr(module, "clock", lambda: self.now)
        monkeypatch.setattr(pace, "measure", lambda *_: Pace(planned, 0.0, 0.0, 0.0))
        # A short text must not end the run.
        monkeypatch.setattr(pace, "most_steps", lambda *_: 10**6)

    def drive(self, run):
        """From now on each step of a run takes its time."""
        model = run.training.model
        original = model.loss_and_gradients

        def passing(*arguments, **named):
            self.now += self.seconds(run.training.progress.step + 1)
            return original(*arguments, **named)

        model.loss_and_gradients = passing
        return run


def train(clock, path, minutes=1.0):
    run = create(path, minutes=minutes, **FIELDS)
    begun = clock.now
    clock.drive(run)
    run.train()
    clock.spent.append(clock.now - begun)
    return run


def weights(run):
    return run.load(backend="numpy")[0].flat.data


def replayed(run):
    """Trains a run in one go, by the lengths that it has written -> its weights."""
    again = Run.open(run.path)
    training = again.training
    for _ in training.steps(again.settings.training):
        pass
    assert training.progress.step == run.settings.training.steps
    return training.model.flat.data


SPEEDS = {
    "as planned": lambda _: 0.3,
    "faster from the first step on": lambda _: 0.05,
    "slower from the first step on": lambda _: 1.5,
    "slower from the middle on": lambda step: 0.2 if step < 50 else 1.0,
    "faster from the middle on": lambda step: 0.6 if step < 25 else 0.1,
    "slower now and then": lambda step: 0.3 if step % 40 < 25 else 0.6,
}


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_run_takes_its_minutes_whatever_the_machine_does(speed, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, SPEEDS[speed], planned=0.3)
    run = train(clock, tmp_path / "run", minutes=0.5)
    slowest = max(map(SPEEDS[speed], range(1, run.settings.training.steps + 1)))
    assert 0.93 * MINUTE / 2 < clock.spent[0] <= MINUTE / 2 + slowest
    assert run.is_finished and Run.open(run.path).is_finished
    assert all(verdict.fault is None for verdict in Run.open(run.path).verify())
    assert (replayed(run) == weights(run)).all()
    rates = [row["lr"] for row in run.metrics().rows if row.get("lr") is not None]
    assert rates[-1] < 0.1 * max(rates)  # the schedule has come to its end


def test_a_machine_as_fast_as_measured_keeps_the_length(tmp_path, monkeypatch):
    run = train(Clock(monkeypatch, lambda _: 0.3, planned=0.3), tmp_path / "run")
    (_, planned), *others = run.settings.training.fitted
    assert all(abs(steps - planned) <= 0.02 * planned for _, steps in others)


@pytest.mark.parametrize("moment", [20, pytest.param(65, marks=pytest.mark.slow), 97])
def test_a_run_that_is_killed_resumes_with_the_bits_of_its_lengths(moment, tmp_path, monkeypatch):
    """A kill leaves what a copy of the files has at that moment."""
    clock = Clock(monkeypatch, lambda step: 0.3 if step < 60 else 0.45, planned=1.0)
    run = clock.drive(create(tmp_path / "run", minutes=1.0, **{**FIELDS, "log_every": 1}))
    left = None
    for record in run.steps():
        if isinstance(record, StepRecord) and record.step == moment and left is None:
            left = shutil.copytree(run.path, tmp_path / "left")
            at_kill, before = clock.now, run.settings.training.fitted
    assert len(before) > 1 and run.is_finished
    resumed = Run.open(left)
    saved = resumed.newest()
    lost = at_kill - (saved.state["progress"]["seconds"]["total"] if saved else 0.0)
    begun = clock.now
    clock.drive(resumed).resume()
    assert resumed.settings.training.fitted[: len(before)] == before
    # The time that was trained again is trained twice; all other is within the minute.
    assert at_kill - lost + clock.now - begun <= MINUTE + 0.45
    assert at_kill - lost + clock.now - begun > 0.93 * MINUTE
    assert all(verdict.fault is None for verdict in Run.open(left).verify())
    assert (replayed(resumed) == weights(resumed)).all()


def test_a_length_is_on_disk_before_the_first_step_that_follows_it(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, lambda _: 0.1, planned=1.0)
    run, seen = clock.drive(create(tmp_path / "run", minutes=1.0, **FIELDS)), []
    refit = run.training._run.__class__.refit

    def checked(live, steps):
        refit(live, steps)
        on_disk = json.loads((run.path / "config.json").read_text())["training"]
        seen.append((on_disk["lengths"], on_disk["steps"]))
        assert seen[-1] == (live.config.lengths, live.config.steps)

    monkeypatch.setattr(run.training._run.__class__, "refit", checked)
    run.train()
    assert seen


def test_a_length_that_cannot_be_written_is_not_followed(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, lambda _: 0.1, planned=1.0)
    run, write = clock.drive(create(tmp_path / "run", minutes=0.2, **FIELDS)), durable.write

    def full(path, *arguments):
        progress, steps = run.training.progress, run.training.config.steps
        if Path(path).name == "config.json" and 0 < progress.step < steps:
            raise OSError(28, "No space left on device")
        write(path, *arguments)

    monkeypatch.setattr(durable, "write", full)
    run.train()
    assert run.is_finished and run.settings.training.lengths == "0:11"
    assert Run.open(run.path).settings == run.settings


def test_a_run_ends_though_its_time_is_over_before_the_first_step(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, lambda _: 100.0, planned=0.3)
    run = train(clock, tmp_path / "run")
    assert run.is_finished and run.settings.training.steps <= 5


def test_a_run_by_minutes_that_is_made_longer_has_the_length_that_it_gets(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, lambda _: 0.2, planned=1.0)
    train(clock, tmp_path / "run", minutes=0.2)
    run = Run.open(tmp_path / "run")
    clock.drive(run).resume(steps=90)
    assert run.settings.training.steps == 90 and run.settings.training.lengths is None
    again = Run.open(run.path)
    assert again.is_finished and again.settings == run.settings
    assert all(verdict.fault is None for verdict in again.verify())


def test_the_command_line_says_what_became_of_the_minutes(tmp_path, text, monkeypatch, cli):
    flags = "--backend numpy --n-embd 8 --n-layer 1 --n-head 2 --block-size 8 --batch-size 2"
    monkeypatch.setattr(pace, "measure", lambda *_: Pace(60.0, 0.0, 0.0, 0.0))
    lengths = iter([250, None])
    monkeypatch.setattr(pace, "refitting", lambda *_: lambda: next(lengths, None))
    printed = cli("train", text, flags, "--minutes 10 --out", tmp_path / "run").flat
    assert "Steps were adjusted to the time as the run went: 9 planned, 250 done" in printed
    assert "step 250/250" in printed and "step 1/9" in printed
    assert "of 10:00: more than 64 passes over the text would only memorise it" in printed
    monkeypatch.setattr(pace, "refitting", lambda *_: lambda: None)
    printed = cli("train", text, flags, "--minutes 10 --out", tmp_path / "as-planned").flat
    assert "Steps were adjusted" not in printed


# Schedules that depend on the length of a run.
STRETCHED = [name for name in SCHEDULES if name not in ("constant", "step", "plateau")]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("at", "steps"), [(40, 70), (40, 400), (3, 50), (99, 150)])
def test_another_length_stretches_what_is_left_of_a_schedule(name, at, steps):
    planned = TrainingConfig(
        steps=100, schedule=name, warmup_steps=10, learning_rate=1.0, min_lr=0.1, lr_decay_every=30
    ).fitted_to(100)
    before = schedule(planned)
    after = schedule(planned.fitted_to(steps, at))
    assert [after.lr(step) for step in range(at + 1)] == [before.lr(s) for s in range(at + 1)]
    if name in STRETCHED:
        for share in (0.25, 0.5, 0.75):
            here, there = at + share * (steps - at), at + share * (100 - at)
            assert after.lr(here) == pytest.approx(before.lr(there))
        assert after.lr(steps) == pytest.approx(0.1)
    elif name == "step":
        assert [after.lr(s) for s in range(steps)] == [before.lr(s) for s in range(steps)]
    unchanged = schedule(planned.fitted_to(100, at))
    assert np.allclose([unchanged.lr(s) for s in range(100)], [before.lr(s) for s in range(100)])


def test_lengths_say_how_long_a_run_was_to_become():
    config = TrainingConfig(steps=100).fitted_to(100)
    assert config.lengths == "0:100" and config.fitted == ((0, 100),)
    longer = config.fitted_to(300, 40).fitted_to(200, 120)
    assert longer.lengths == "0:100,40:300,120:200" and longer.steps == 200
    assert longer.as_of(0) == longer.as_of(40) == config
    assert longer.as_of(41).lengths == longer.as_of(120).lengths == "0:100,40:300"
    assert longer.as_of(41).steps == 300 and longer.as_of(121) == longer
    assert longer.fitted_to(90, 40).lengths == "0:100,40:90"
    plain = TrainingConfig(steps=100)
    assert plain.fitted == () and plain.as_of(50) == plain


@pytest.mark.parametrize(
    "lengths",
    ["", "100", "0:99", "5:100", "0:90,3:2,4:100", "0:90,9:80,7:100", "0:x", "0:100,100:100"],
)
def test_lengths_of_another_form_are_refused(lengths):
    refuses("must be STEP:STEPS", TrainingConfig, steps=100, lengths=lengths)


def test_the_lengths_of_a_run_are_not_those_of_the_next(tmp_path, monkeypatch, cli):
    clock = Clock(monkeypatch, lambda _: 0.2, planned=1.0)
    run = train(clock, tmp_path / "run", minutes=0.2)
    settings = dataclasses.replace(
        run.settings, run=dataclasses.replace(run.settings.run, minutes=None)
    )
    again = Run.create(settings, TEXT, out=tmp_path / "again")
    assert again.settings.training.lengths is None
    assert again.settings.training.steps == run.settings.training.steps
    again.discard_untrained()
    (tmp_path / "own.toml").write_text("[training]\nlengths = '0:5'\n")
    refuses(
        "lengths='0:5' follows from the minutes; leave it out", read_settings, tmp_path / "own.toml"
    )
