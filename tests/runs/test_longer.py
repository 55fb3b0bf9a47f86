"""A run goes further: made longer when it resumes, or begun from the weights of another."""

import json
import shutil

import numpy as np
import pytest

from smallmind import InputError, Run
from smallmind.optim.schedule import schedule
from smallmind.training.records import EarlyStopRecord, StepRecord
from tests.programs import refuses
from tests.runs.small import TEXT, create, left


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = create(tmp_path_factory.mktemp("longer") / "run")
    run.train()
    return run.path


@pytest.fixture
def path(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def rates(records):
    return {r.step: r.lr for r in records if isinstance(r, StepRecord)}


def weights(run, checkpoint=None):
    return run.load(checkpoint, backend="numpy")[0].flat.data


def test_a_finished_run_is_made_longer(path):
    before = weights(Run.open(path)).copy()
    run = Run.open(path)
    records = run.resume(steps=12)
    lr = schedule(run.settings.training).lr
    assert rates(records) == {step: lr(step - 1) for step in range(7, 13)}
    again = Run.open(path)
    assert again.settings.training.steps == 12 and again.is_finished
    assert (weights(again) != before).any()
    assert (weights(again) == weights(again, 12)).all()
    assert [row["step"] for row in again.metrics().rows] == list(range(1, 13))
    samples = (path / "samples.txt").read_text(encoding="utf-8")
    assert "--- step 6\n" in samples and "--- step 12\n" in samples
    assert all(verdict.fault is None for verdict in again.verify())


def test_a_longer_run_that_is_interrupted_continues_bit_for_bit(path, finished, tmp_path):
    whole = Run.open(shutil.copytree(finished, tmp_path / "whole"))
    whole.resume(steps=12)
    run = Run.open(path)
    run.extend(12)
    left(run, step=8)
    assert not Run.open(path).is_finished
    Run.open(path).resume()
    assert (weights(Run.open(path)) == weights(whole)).all()


def test_a_killed_longer_run_is_not_finished_and_its_newest_checkpoint_counts(path):
    run = Run.open(path)
    model = (path / "model.safetensors").read_bytes()
    run.resume(steps=12)
    (path / "model.safetensors").write_bytes(model)  # as before the last save
    newest = weights(Run.open(path))
    assert (newest == weights(Run.open(path), 12)).all()


def test_early_stopping_starts_anew_in_a_longer_run(tmp_path):
    stopping = {"early_stopping_patience": 2, "early_stopping_min_delta": 9.0}
    run = create(tmp_path / "run", val_every=1, steps=20, **stopping)
    assert isinstance(run.train()[-1], EarlyStopRecord)
    stopped = Run.open(run.path)
    step = stopped.newest().step
    assert step == 3 and stopped.is_finished
    stopped.extend(20)
    assert not stopped.is_finished
    records = stopped.resume()
    assert isinstance(records[-1], EarlyStopRecord) and records[-1].step == step + 2
    assert Run.open(run.path).is_finished
    assert all(verdict.fault is None for verdict in Run.open(run.path).verify())


def test_a_length_that_is_reached_already_is_refused(path):
    before = (path / "config.json").read_bytes()
    for steps in (5, 6):
        with pytest.raises(InputError, match=f"steps={steps}: the run has trained 6 steps alrea"):
            Run.open(path).resume(steps=steps)
    refuses("is set in steps: give steps", Run.open(path).resume, epochs=3)
    assert (path / "config.json").read_bytes() == before


def test_epochs_are_made_longer_in_epochs(tmp_path):
    run = create(tmp_path / "run", block_size=64, batch_size=16, epochs=1)
    run.train()
    per_epoch = run.settings.training.steps
    refuses("is set in epochs: give epochs", Run.open(run.path).resume, steps=9999)
    longer = Run.open(run.path)
    longer.resume(epochs=2)
    assert longer.settings.training.steps == longer.newest().step == 2 * per_epoch


def test_the_command_line_makes_a_run_longer(path, cli):
    printed = cli("train --resume", path).out
    assert "To train longer: smallmind train" in printed and "--steps 12" in printed
    printed = cli("train --resume", path, "--steps 9").flat
    assert "Resuming after step 6, with the learning rate schedule of a run of 9" in printed
    assert "step 9/9" in printed
    assert Run.open(path).is_finished


def test_a_run_starts_from_the_weights_of_another(path, tmp_path):
    source = weights(Run.open(path))
    checkpoint = path / "checkpoints" / "step-00000006.safetensors"
    for init in (path, path / "model.safetensors", checkpoint):
        fields = {"steps": 2, "backend": "numpy", "val_every": 0, "save_every": 0}
        out = tmp_path / f"tuned-{init.name}"
        run = Run.create(text="the cat.\n" * 90, init_from=init, out=out, **fields)
        assert run.settings.model.n_embd == 8 and run.settings.model.n_layer == 1
        assert run.data.tokenizer.state() == Run.open(path).load(backend="numpy")[1].state()
        assert (run.training.model.flat.data == source).all()
        run.train()
        assert (weights(Run.open(run.path)) != source).any()


def test_a_tuned_run_starts_over_and_resumes_bit_for_bit(path, tmp_path):
    fields = {"text": TEXT, "init_from": str(path), "backend": "numpy", "steps": 4, "save_every": 2}
    whole = Run.create(out=tmp_path / "whole", **fields)
    whole.train()
    Run.create(out=tmp_path / "tuned", **fields)
    Run.open(tmp_path / "tuned").resume()  # killed before its first checkpoint
    assert (weights(Run.open(tmp_path / "tuned")) == weights(whole)).all()
    Run.create(out=tmp_path / "changed", **fields)
    Run.open(path).resume(steps=7)
    with pytest.raises(InputError, match="has changed since the run was created; start a new run"):
        Run.open(tmp_path / "changed").resume()
    shutil.rmtree(path)  # not needed once there is a checkpoint
    longer = Run.open(tmp_path / "tuned")
    longer.resume(steps=5)
    assert longer.newest().step == 5


def test_what_does_not_fit_the_weights_is_refused(path, tmp_path):
    for fields, message in [
        ({"n_layer": 3}, r"n_layer=3 contradicts .*run, whose weights have n_layer=1; leave it"),
        ({"tokenizer": "byte"}, r"tokenizer='byte' contradicts .* have tokenizer='char'"),
        ({"init_from": str(tmp_path / "none")}, "does not exist; give a run, a checkpoint"),
    ]:
        with pytest.raises(InputError, match=message):
            Run.create(**{"text": TEXT, "init_from": str(path), "out": tmp_path / "new", **fields})
    assert not (tmp_path / "new").exists()


def test_the_command_line_starts_from_a_run(path, tmp_path, cli):
    (tmp_path / "new.txt").write_text("the dog sat. " * 90, encoding="utf-8")
    out = tmp_path / "tuned"
    flags = tmp_path / "new.txt", "--init-from", path, "--backend numpy"
    assert "loss at the start" not in cli("check", *flags).out
    cli("train", *flags, "--steps 2 --out", out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["run"]["init_from"] == str(path) and config["model"]["n_embd"] == 8
    assert np.isfinite(weights(Run.open(out))).all()
