"""A run that fits in a given time: what is timed, and how many steps follow from it."""

import collections
import dataclasses
import json
import re
import sys

import pytest
from numba import get_num_threads

from smallmind import (
    AdamW,
    Distillation,
    InputError,
    Run,
    Tokenizer,
    Training,
    TrainingConfig,
    TransformerModel,
)
from smallmind.cli.timing import about, slower_than_float32, time_of_run
from smallmind.forecast import compiling, pace
from smallmind.forecast.compiling import rehearse
from smallmind.forecast.pace import Pace, fit_steps, kept_pace, measure, rough_pace
from smallmind.kernels.codegen import cache_directory
from smallmind.kernels.codegen.threads import are_fixed, max_threads, set_threads, threads
from tests.programs import CATS, finished
from tests.training.test_distillation import new_teacher, new_training, sharp
from tests.training.test_resume import digest

TEXT = CATS


@pytest.fixture
def take(monkeypatch):
    """From now on steps and evaluations take these seconds, however they are timed."""

    def take(*seconds, **more):
        monkeypatch.setattr(pace, "rough_pace", lambda *_: Pace(*seconds, **more))
        monkeypatch.setattr(pace, "measure", lambda *_: Pace(*seconds))
        monkeypatch.setattr(pace, "refitting", lambda *_: lambda: None)

    return take


def small_training():
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 16, 16, 1, 2, dropout=0.1, seed=3)
    return Training(model, tokenizer, TEXT, batch_size=3, seed=5)


@pytest.mark.parametrize("val_every", [0, 7, 100])
def test_as_many_steps_fit_as_evaluations_and_saves_allow(val_every):
    config = TrainingConfig(val_every=val_every, save_every=50, warmup_steps=100)
    measured = Pace(step=0.01, evaluation=0.2, save=0.05, end=2.0)
    result = fit_steps(config, measured, 60)
    steps = result.steps
    more = dataclasses.replace(result, steps=steps + 1)
    assert measured.total(result) <= 60 * 0.98 < measured.total(more)
    saves = 1 + steps // 50 + (steps // val_every if val_every else 0)
    evaluations = -(-steps // val_every) if val_every else 0
    total = 0.01 * steps + 0.2 * evaluations + 0.05 * saves + 2
    assert measured.total(result) == pytest.approx(total)
    assert result == dataclasses.replace(config, steps=steps, warmup_steps=min(100, steps // 10))


def test_time_for_samples_is_set_aside():
    measured = Pace(step=0.01, evaluation=0.0, save=0.0, end=2.0, sample=0.5)
    config = TrainingConfig(val_every=0, save_every=0, sample_every=10, warmup_steps=0)
    result = fit_steps(config, measured, 20)
    assert measured.total(result) <= 20 * 0.98
    expected = 0.01 * result.steps + 0.5 * ((result.steps - 1) // 10) + 2
    assert measured.total(result) == pytest.approx(expected) and result.steps < 400


def test_at_most_so_many_steps_fit():
    config, measured = TrainingConfig(val_every=0, warmup_steps=100), Pace(0.01, 0.2, 0.05, 2.0)
    result = fit_steps(config, measured, 60, most=30)
    assert result == dataclasses.replace(config, steps=30, warmup_steps=3)


def test_too_little_time_is_refused_with_the_time_needed():
    message = r"1\.0 seconds are left, and a run of 10 steps takes 14\.5: give"
    with pytest.raises(InputError, match=message):
        fit_steps(TrainingConfig(val_every=0, save_every=0), Pace(1.0, 0, 0.2, 4.0), 1.0)


def test_measuring_changes_nothing(tmp_path):
    config = TrainingConfig(steps=6, val_every=3, val_batches=2, precision="float16")
    plain, measured = small_training(), small_training()
    for training in (plain, measured):
        training.model.use_precision(config.requested_precision)
    flat = measured.model.flat
    before = flat.data.tobytes(), flat.copies[0].values.tobytes()
    result = measure(measured, config, 0.2, tmp_path)
    assert (flat.data.tobytes(), flat.copies[0].values.tobytes()) == before
    assert measured.progress.step == measured.state().state["passes"] == 0
    assert not measured.model.flat.grad.any()
    assert list(tmp_path.iterdir()) == []
    assert min(dataclasses.astuple(dataclasses.replace(result, update=1.0))) > 0
    list(plain.steps(config))
    list(measured.steps(config))
    assert digest(measured) == digest(plain)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_rough_pace_changes_nothing(precision):
    settings = {"steps": 6, "val_every": 3, "val_batches": 2, "use_gradient_checkpointing": True}
    settings |= {"precision": precision, "grad_accum_steps": 2, "micro_batch_size": 2}
    config, plain, timed = TrainingConfig(**settings), small_training(), small_training()
    before = timed.model.flat.data.tobytes()
    pace = rough_pace(timed, config)
    assert timed.model.flat.data.tobytes() == before and not timed.model.flat.grad.any()
    assert timed.model.passes == timed.progress.step == 0
    assert timed.model.precision == "float32" and timed.model.micro_batch_size is None
    assert min(pace.step, pace.evaluation, pace.end) > 0
    list(plain.steps(config))
    list(timed.steps(config))
    assert digest(timed) == digest(plain)


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """The paces that were timed, while those that are kept are in an empty directory.

    The nth one has n seconds per step.
    """
    paces = []

    def rough_pace(*_, spread=1.0):
        paces.append(Pace(len(paces) + 1.0, 0.0, 0.0, 0.0, spread=spread))
        return paces[-1]

    monkeypatch.setattr(pace, "rough_pace", rough_pace)
    monkeypatch.setattr(cache_directory, "cache_directory", lambda _: tmp_path)
    return paces


def test_a_later_start_takes_the_pace_that_an_earlier_one_has_timed(timed):
    config = TrainingConfig(steps=6, warmup_steps=2)
    kept = kept_pace(small_training(), config)
    longer = dataclasses.replace(config, steps=600, warmup_steps=20)
    assert kept == kept_pace(small_training(), config) == kept_pace(small_training(), longer)
    assert timed == [kept]


@pytest.mark.parametrize("other", ["model", "windows", "threads", "precision", "evaluations"])
def test_the_pace_of_another_run_is_timed(timed, monkeypatch, other):
    config, training = TrainingConfig(precision="float32"), small_training()
    kept_pace(training, config)
    if other == "model":
        training.model = TransformerModel(27, 16, 32, 1, 2)
    elif other == "windows":
        training.data.batch_size = 4
    elif other == "threads":
        monkeypatch.setattr("smallmind.kernels.codegen.threads.threads", lambda: 7)
    elif other == "precision":
        config = dataclasses.replace(config, precision="float16")
    else:
        config = dataclasses.replace(config, val_batches=9)
    assert kept_pace(training, config).step == len(timed) == 2


@pytest.mark.parametrize(("seconds", "is_said"), [(0.3, True), (0.2, False)])
def test_16_bits_that_were_slower_here_are_named(tmp_path, monkeypatch, seconds, is_said):
    """By the paces of two runs that are alike but for their precision."""
    steps = iter([0.2, seconds])
    monkeypatch.setattr(pace, "kept_pace", kept_pace)
    monkeypatch.setattr(pace, "rough_pace", lambda *_: Pace(next(steps), 0.0, 0.0, 0.0))
    monkeypatch.setattr(cache_directory, "cache_directory", lambda _: tmp_path)
    fields = {"block_size": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "steps": 2}
    for precision, expected in (("float32", False), ("bfloat16", is_said)):
        run = Run.create(text=TEXT, out=tmp_path / precision, precision=precision, **fields)
        time_of_run(run)
        assert bool(slower_than_float32(run)) == expected
        run.unlock()
    if is_said:
        assert "1.50 times as long as in float32" in slower_than_float32(run)


def test_a_pace_that_others_disturbed_or_that_was_damaged_is_timed_again(timed, monkeypatch):
    training, config, usual = small_training(), TrainingConfig(), pace.rough_pace
    with monkeypatch.context() as patch:
        patch.setattr(pace, "rough_pace", lambda *run: usual(*run, spread=pace.BUSY))
        kept_pace(training, config)
    kept_pace(training, config)
    assert len(timed) == 2
    (kept,) = cache_directory.cache_directory("").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    kept_pace(training, config)
    assert len(timed) == 3


def test_a_pace_is_timed_where_none_can_be_kept(timed, monkeypatch, tmp_path):
    training, config = small_training(), TrainingConfig()
    for directory in None, tmp_path / "missing":
        monkeypatch.setattr(cache_directory, "cache_directory", lambda _, where=directory: where)
        kept_pace(training, config)
        kept_pace(training, config)
    assert len(timed) == 4


SHAPE = "--block-size 16 --n-embd 16 --n-layer 1 --n-head 2 --val-every 0"


def test_a_run_that_is_timed_before_it_starts_learns_the_same(text, tmp_path, monkeypatch, cli):
    flags = f"{SHAPE} --steps 4 --warmup-steps 1 --dropout 0.1"
    models, rehearsed = [], []
    for name in ("untimed", "timed"):
        shown = cli("train", text, flags, "--out", tmp_path / name).cells["time"]
        assert shown.startswith("about ")
        models.append((tmp_path / name / "model.safetensors").read_bytes())
        # conftest.py replaces both.
        monkeypatch.setattr(pace, "rough_pace", rough_pace)
        monkeypatch.setattr(compiling, "rehearse", lambda *run: rehearsed.append(rehearse(*run)))
    assert rehearsed and models[0] == models[1]


def test_a_large_batch_is_extrapolated_from_some_of_its_windows(monkeypatch):
    """By a clock that counts windows: a second each in training, a third of one in evaluations."""
    training, now, seen = small_training(), [0.0], []
    training.data.batch_size = 40
    model = training.model
    original = model.loss_and_gradients, model.losses

    def loss_and_gradients(ids, *arguments):
        now[0] += len(ids)
        seen.append(len(ids))
        return original[0](ids, *arguments)

    def losses(ids, *arguments):
        now[0] += len(ids) / 3
        return original[1](ids, *arguments)

    monkeypatch.setattr(model, "loss_and_gradients", loss_and_gradients)
    monkeypatch.setattr(model, "losses", losses)
    monkeypatch.setattr(pace, "clock", lambda: now[0])
    operations = pace.OPERATIONS * model.flat.data.size * 16
    monkeypatch.setattr(pace, "MAX_OPERATIONS", 7 * operations)
    result = rough_pace(training, TrainingConfig(grad_accum_steps=3, val_batches=5))
    assert set(seen) == {7}
    assert result.step == pytest.approx(3 * 40) and result.update == 0
    assert result.evaluation == pytest.approx(2 * 5 * 40 / 3)


def clocked(monkeypatch, training, seconds):
    """By a clock of its own: the nth pass, update or evaluation of a batch takes seconds(n)."""
    now, model = [0.0], training.model
    counts = collections.Counter()

    def timed(name, function):
        def run(*arguments):
            counts[name] += 1
            now[0] += seconds(counts[name])
            return function(*arguments)

        return run

    monkeypatch.setattr(model, "losses", timed("losses", model.losses))
    monkeypatch.setattr(model, "loss_and_gradients", timed("learning", model.loss_and_gradients))
    monkeypatch.setattr(AdamW, "step", timed("update", AdamW.step))
    monkeypatch.setattr(pace, "clock", lambda: now[0])


def test_a_long_window_is_timed_once(monkeypatch):
    training, config = small_training(), TrainingConfig(val_batches=4)
    clocked(monkeypatch, training, lambda n: 40.0 if n == 1 else 1000.0)
    monkeypatch.setattr(pace, "MAX_OPERATIONS", 1.0)  # one window
    monkeypatch.setattr(pace, "LONG_WINDOW", 10.0)
    assert rough_pace(training, config).step == training.data.batch_size * 40.0 + 40.0


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_kernels_that_are_loaded_and_a_slow_try_are_left_out(monkeypatch, slow):
    training = small_training()
    clocked(monkeypatch, training, lambda n: 500.0 if n in (1, slow) else 2.0)
    found = rough_pace(training, TrainingConfig(val_batches=4, micro_batch_size=3))
    assert found.step == 2.0 + 2.0 and found.evaluation == 2 * 4 * 2.0
    assert found.update == 2.0
    assert found.spread == 1.0


@pytest.mark.parametrize("val_every", [0, 10])
def test_evaluations_are_measured_too(monkeypatch, val_every):
    training = small_training()
    clocked(monkeypatch, training, lambda _: 2.0)
    config = TrainingConfig(val_every=val_every, val_batches=3, micro_batch_size=3)
    found = measure(training, config, 60)
    assert found.step == 2.0 + 2.0
    assert found.evaluation == (2 * 3 * 2.0 if val_every else 0.0)
    assert found.end == 2 * 2.0 * training.data.held_out_batches > 0


@pytest.mark.parametrize("stopped_in", ["loss_and_gradients", "losses"])
def test_a_measurement_that_is_stopped_counts_for_nothing(monkeypatch, stopped_in):
    training = small_training()
    before, counts = digest(training), collections.Counter()
    original = getattr(training.model, stopped_in)

    def method(*arguments):
        counts[stopped_in] += 1
        if counts[stopped_in] == 2:
            training.stop()
        return original(*arguments)

    monkeypatch.setattr(training.model, stopped_in, method)
    assert measure(training, TrainingConfig(val_every=3, val_batches=2), 0.2) is None
    assert digest(training) == before


def test_tries_that_differ_give_a_range(monkeypatch):
    training = small_training()
    clocked(monkeypatch, training, lambda n: 100.0 * n * n)
    found = rough_pace(training, TrainingConfig(micro_batch_size=3))
    assert found.spread == pytest.approx(16 / 9)  # the third to the fifth: 900, 1600 and 2500
    assert about(100, found.spread) == "about 2 to 3 min" and about(100, 1.2) == "about 2 min"
    assert about(50, 1.5) == "about 50 to 75 s" and about(0.1, 4) == "about 1 s"


def test_only_what_remains_of_a_run_counts():
    config = TrainingConfig(steps=100, val_every=10, save_every=0, sample_every=25)
    measured = Pace(step=1.0, evaluation=3.0, save=0.0, end=20.0, sample=7.0)
    whole = measured.total(config)
    assert whole == 100 + 10 * 3 + 3 * 7 + 20 == measured.total(config, 0)
    assert measured.total(dataclasses.replace(config, steps=101)) == whole + 1 + 3 + 7
    assert measured.total(config, 60) == 40 + 4 * 3 + 1 * 7 + 20
    assert measured.total(config, 100) == 20  # only the end is missing
    assert measured.total(dataclasses.replace(config, steps=0)) == 20


def test_looks_at_a_target_take_a_tenth_of_the_training():
    config = TrainingConfig(steps=100, val_every=1000, save_every=0, target_loss=1.5)
    measured = Pace(step=1.0, evaluation=0.0, save=0.0, end=20.0)
    assert measured.total(config) == pytest.approx(110 + 20)
    assert measured.total(config, 60) == pytest.approx(44 + 20)
    assert measured.total(config, 100) == 20


def test_the_sample_at_the_end_counts_and_is_timed_warm(monkeypatch):
    training, now = small_training(), [0.0]
    calls = []

    def sample(max_tokens):
        calls.append(max_tokens)
        now[0] += 1000.0 if len(calls) == 1 else 0.5 * max_tokens  # the first one loads kernels

    monkeypatch.setattr(training, "sample", sample)
    monkeypatch.setattr(pace, "clock", lambda: now[0])
    found = rough_pace(training, TrainingConfig(sample_every=0))
    assert found.end == found.sample == 0.5 * pace.SAMPLE_TOKENS


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "about 1 s"),
        (17.4, "about 17 s"),
        (63, "about 65 s"),
        (100, "about 2 min"),
        (3000, "about 50 min"),
        (7000, "about 2 h"),
        (4 * 86400, "about 4 days"),
    ],
)
def test_a_time_in_words(seconds, words):
    assert about(seconds) == words


def test_the_time_is_shown_before_the_run_and_by_estimate(text, tmp_path, take, cli):
    take(6.0, 0.0, 0.0, 0.0)
    flags = f"{SHAPE} --steps 20 --warmup-steps 2"
    printed = cli("estimate", text, flags).out
    assert "Time on this machine: about 2 min, 20 steps of 6,000 ms." in printed
    shown = cli("train", text, flags, "--out", tmp_path / "run").cells["time"]
    assert shown == "about 2 min"


FLAGS = f"{SHAPE} --batch-size 4 --save-every 10 --warmup-steps 2"


def test_a_resumed_run_shows_what_is_left(text, tmp_path, take, cli):
    take(6.0, 0.0, 0.0, 7.0)
    out = tmp_path / "run"
    printed = cli("train", text, FLAGS, "--steps 20 --out", out)
    assert printed.cells["time"] == "about 2 min"  # 127 seconds
    (out / "samples.txt").unlink()
    assert cli("train --resume", out).cells["time"] == "about 7 s"  # only the end
    assert "time" not in cli("train --resume", out).out  # finished
    assert cli("train --resume", out, "--steps 28").cells["time"] == "about 55 s"


def test_no_steps_take_the_time_of_the_end(text, tmp_path, take, cli):
    take(6.0, 5.0, 0.0, 7.0)
    printed = cli("train", text, FLAGS, "--steps 0 --val-every 4 --out", tmp_path / "r")
    assert printed.cells["time"] == "about 7 s"


def test_a_run_that_has_ended_early_shows_only_its_end(text, tmp_path, take, cli):
    take(6.0, 0.0, 0.0, 7.0)
    out = tmp_path / "run"
    flags = "--val-every 2 --target-loss 9 --steps 20 --out"
    assert cli("train", text, FLAGS, flags, out).cells["time"] == "at most about 2 min"
    assert not (out / "checkpoints" / "step-20.safetensors").exists()
    (out / "samples.txt").unlink()
    assert cli("train --resume", out).cells["time"] == "about 7 s"


def test_minutes_that_would_memorise_the_text_are_not_all_taken(
    text, tmp_path, monkeypatch, take, cli
):
    """One pass over 2592 tokens, 64 of them per step: 40 steps."""
    take(0.02, 0.0, 0.0, 5.0, spread=9.0)
    monkeypatch.setattr(pace, "MAX_PASSES", 1)
    command = text, FLAGS, "--minutes 10"
    assert "Time on this machine: about 1 to 6 s." in cli("estimate", *command).out
    assert cli("train", *command, "--out", tmp_path / "run").cells["time"] == "about 6 s"
    take(20.0, 0.0, 0.0, 5.0, spread=9.0)
    assert "Time on this machine: about 1 to 10 min." in cli("estimate", *command).out


def test_an_estimate_says_that_a_run_may_end_early(text, take, cli):
    take(10.0, 0.0, 0.0, 0.0)
    printed = cli("estimate", text, FLAGS, "--val-every 50 --steps 30 --target-loss 1.5").out
    assert "Time on this machine: at most about 6 min, 30 steps" in printed


def test_measuring_does_not_change_the_temperature(tmp_path):
    distillation = Distillation(sharp(new_teacher()), 3.0, learn_temperature=True)
    training, before = new_training(distillation), distillation.parameter.state()
    measure(training, TrainingConfig(val_every=3, val_batches=2), 0.2, tmp_path)
    assert distillation.parameter.state() == before
    training.train(1, val_every=0)
    assert distillation.parameter.state()["updates"] == 1


def test_the_number_of_steps_is_shown_and_saved(text, tmp_path, monkeypatch, take, cli):
    take(6.0, 0.0, 0.0, 0.0)
    out, again = tmp_path / "run", tmp_path / "again"
    printed = cli("train", text, SHAPE, "--log-every 1 --minutes 3 --out", out).out
    config = json.loads((out / "config.json").read_text())
    steps = config["training"]["steps"]
    assert config["training"]["warmup_steps"] == steps // 10
    shown = re.search(r"(\d+) steps fit in\s+the\s+remaining (\d+)\s+s\s+\(6", printed)
    # The seconds that remain after the start depend on how busy the machine is.
    assert int(shown[1]) == steps and 6 * steps <= 0.98 * (int(shown[2]) + 0.5) < 6 * (steps + 1.1)
    assert f"step {steps}/{steps}" in printed
    monkeypatch.setattr(pace, "measure", None)  # a resumed run times nothing
    (out / "model.safetensors").unlink()
    cli("train --resume", out)
    assert f"is finished: {steps} steps" in cli("train --resume", out).out
    cli("train --config", out / "config.json", "--out", again)  # with the same number of steps
    expected = config["training"] | {"lengths": None}
    assert json.loads((again / "config.json").read_text())["training"] == expected


KILLED = """
import os, signal, sys
from smallmind.cli import main
from smallmind.forecast import pace
pace.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


def test_a_run_that_was_killed_while_timed_still_ends_after_its_minutes(text, tmp_path, take, cli):
    out = tmp_path / "run"
    words = ["train", text, *SHAPE.split(), "--minutes", "1", "--out", str(out)]
    assert finished([sys.executable, "-c", KILLED, *words]).returncode == -9
    assert list(out.glob(".timing-*"))
    take(6.0, 0.0, 0.0, 0.0)
    printed = cli("train --resume", out).out
    assert re.search(r"\(6\S* s\s+each\)", printed)
    assert "Starting over: no checkpoint yet" in printed
    steps = json.loads((out / "config.json").read_text())["training"]["steps"]
    assert steps < 10 and f"step {steps}/{steps}" in printed
    assert not list(out.glob(".timing-*"))


def test_too_few_minutes_leave_nothing_behind(text, tmp_path, take, cli):
    take(600.0, 0.0, 0.0, 0.0)
    cli.refuses("give more minutes", "train", text, SHAPE, "--minutes 1 --out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_interrupt_while_passes_are_timed_leaves_nothing(text, tmp_path, monkeypatch, cli):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pace, "rough_pace", interrupted)
    cli("train", text, SHAPE, "--out", tmp_path / "run", ends=130)
    assert not (tmp_path / "run").exists()


def test_on_a_busy_machine_one_thread_is_timed_too(monkeypatch):
    """By a clock on which two threads wait for each other, each time for another while."""
    if max_threads() < 2:
        pytest.skip("needs two threads")
    training, before = small_training(), (threads(), are_fixed())
    clocked(monkeypatch, training, lambda n: 3.0 if get_num_threads() == 1 else 5.0 + n % 3 * 9)
    config = TrainingConfig(val_batches=4, micro_batch_size=3)
    try:
        set_threads(2, are_fixed=False)
        assert rough_pace(training, config).step == 3.0 + 3.0 and get_num_threads() == 2
        set_threads(2)  # a number that is given stays
        assert rough_pace(training, config).step >= 14.0
    finally:
        set_threads(*before)
