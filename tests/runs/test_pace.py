"""A run that fits in a given time: what is timed, and how many steps follow from it."""

import dataclasses
import json

import pytest

from smallmind import (
    Distillation,
    InputError,
    Tokenizer,
    Training,
    TrainingConfig,
    TransformerModel,
)
from smallmind.cli import main
from smallmind.runs import pace
from smallmind.runs.pace import Pace, fit_steps, measure
from tests.training.test_distillation import new_teacher, new_training, sharp
from tests.training.test_resume import digest

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 60


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
    evaluations = steps // val_every + 1 if val_every else 0
    total = 0.01 * steps + 0.2 * evaluations + 0.05 * saves + 2
    assert measured.total(result) == pytest.approx(total)
    assert result == dataclasses.replace(config, steps=steps, warmup_steps=min(100, steps // 10))


def test_too_little_time_is_refused_with_the_time_needed():
    with pytest.raises(
        InputError, match=r"1\.0 seconds are left, and a run of 10 steps takes 14\.5: give"
    ):
        fit_steps(TrainingConfig(val_every=0, save_every=0), Pace(1.0, 0, 0.2, 4.0), 1.0)


def test_measuring_changes_nothing(tmp_path):
    config = TrainingConfig(steps=6, val_every=3, val_batches=2, precision="float16")
    plain, measured = small_training(), small_training()
    for training in (plain, measured):
        training.model.use_precision(config.requested_precision)
    before = measured.model.flat.data.tobytes(), measured.model.flat.working.tobytes()
    result = measure(measured, config, 0.2, tmp_path, sample_tokens=20)
    assert (measured.model.flat.data.tobytes(), measured.model.flat.working.tobytes()) == before
    assert measured.progress.step == measured.model.passes == 0
    assert not measured.model.flat.grad.any()
    assert list(tmp_path.iterdir()) == []
    assert min(dataclasses.astuple(result)) > 0
    list(plain.steps(config))
    list(measured.steps(config))
    assert digest(measured) == digest(plain)


def test_measuring_does_not_change_the_temperature(tmp_path):
    distillation = Distillation(sharp(new_teacher()), 3.0, learn_temperature=True)
    training, before = new_training(distillation), distillation.state()
    measure(training, TrainingConfig(val_every=3, val_batches=2), 0.2, tmp_path)
    assert distillation.state() == before
    training.train(1, val_every=0)
    assert distillation.state()["updates"] == 1


def test_the_number_of_steps_is_shown_and_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pace, "measure", lambda *_: Pace(6.0, 0.0, 0.0, 0.0))
    text = tmp_path / "cats.txt"
    text.write_text(TEXT, encoding="utf-8")
    out = tmp_path / "run"
    flags = ["--block-size", "16", "--n-embd", "16", "--n-layer", "1", "--n-head", "2"]
    flags += ["--val-every", "0", "--log-every", "1", "--out", str(out)]
    assert main(["train", str(text), *flags, "--minutes", "3"]) == 0
    printed = capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    steps = config["training"]["steps"]
    assert 25 <= steps <= 29 and config["training"]["warmup_steps"] == 2
    assert f"{steps} steps of 6000.0 ms fit in the 1" in printed
    assert f"step {steps}/{steps}" in printed
    monkeypatch.setattr(pace, "measure", None)  # a resumed run times nothing
    (out / "model.safetensors").unlink()
    assert main(["train", "--resume", str(out)]) == 0
    assert main(["train", "--resume", str(out)]) == 0
    assert f"is finished: {steps} steps" in capsys.readouterr().out
    again = str(tmp_path / "again")  # with the same number of steps
    assert main(["train", "--config", str(out / "config.json"), "--out", again]) == 0
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["training"]
        == (config["training"])
    )


def test_too_few_minutes_leave_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pace, "measure", lambda *_: Pace(600.0, 0.0, 0.0, 0.0))
    text = tmp_path / "cats.txt"
    text.write_text(TEXT, encoding="utf-8")
    flags = ["--block-size", "16", "--n-embd", "16", "--n-layer", "1", "--n-head", "2"]
    flags += ["--minutes", "1", "--out", str(tmp_path / "run")]
    assert main(["train", str(text), *flags]) == 2
    assert "give more minutes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
