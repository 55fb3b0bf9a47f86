"""A run that moves to another machine keeps its precision, and says when its bits will differ."""

import dataclasses
import itertools
import json
import shutil
from contextlib import contextmanager

import pytest

from smallmind import InputError, Run, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.kernels import compiled
from smallmind.kernels.codegen import isa, threads
from smallmind.training import checkpoint
from smallmind.training.records import InstructionSetRecord, StepRecord
from smallmind.training.state import RunState
from tests.programs import CATS, edited
from tests.runs import small

TEXT = CATS
FIELDS = {**small.FIELDS, "block_size": 16, "n_embd": 16, "batch_size": 4, "val_every": 0}
FIELDS["backend"] = "numba"
AUTO = TrainingConfig(steps=4, val_every=0, warmup_steps=1, precision="auto")
OTHER = "AVX-1024"


@contextmanager
def another_cpu():
    """The code within the block takes its CPU for one on which bfloat16 is fast."""
    assert compiled  # the kernels are those of the real CPU
    other = dataclasses.replace(isa.ISA, name=OTHER, pairs=False, fast_bfloat16=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isa, "ISA", other)
        yield


def new_training():
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 16, 16, 1, 2, seed=3)
    return Training(model, tokenizer, TEXT, batch_size=3)


def half_trained(path, **fields):
    """A run that was stopped after its third step."""
    run = small.left(Run.create(text=TEXT, out=path, **FIELDS, **fields), step=3)
    assert not run.is_finished
    return run


def without(state, *names):
    """The state as a version wrote it that did not know these parts."""
    return RunState(
        state.step, state.tensors, {k: v for k, v in state.state.items() if k not in names}
    )


def test_a_run_with_precision_auto_stays_in_its_precision(tmp_path):
    with another_cpu():
        run = half_trained(tmp_path / "run", precision="auto")
    opened = Run.open(run.path)
    records = opened.resume()
    assert opened.training.model.precision == "bfloat16"
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert {record.precision for record in steps} == {"bfloat16"}
    saved = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    assert saved["training"]["precision"] == "bfloat16"


def test_training_with_precision_auto_resumes_in_that_of_the_state(tmp_path):
    with another_cpu():
        list(new_training().steps(AUTO, until=2, saver=checkpoint.BackgroundSaver(tmp_path)))
    state, _ = checkpoint.newest(tmp_path)
    training = new_training()
    first, *rest = training.steps(AUTO, state)
    assert first == InstructionSetRecord(2, OTHER, training.model.instruction_set)
    assert training.model.precision == "bfloat16" and rest[-1].step == 4
    # Without a state the precision suits the CPU again.
    list(training.steps(AUTO, until=1))
    assert training.model.precision == ("bfloat16" if isa.ISA.fast_bfloat16 else "float32")


def test_on_the_same_cpu_nothing_is_said(tmp_path):
    training = new_training()
    list(training.steps(AUTO, until=2))
    records = list(new_training().steps(AUTO, training.state()))
    assert not any(isinstance(record, InstructionSetRecord) for record in records)


def test_the_command_line_says_in_a_line_that_bits_will_differ(tmp_path, cli):
    with another_cpu():
        run = half_trained(tmp_path / "run")
    shutil.copytree(run.path, tmp_path / "same")
    printed = cli("train --resume", run.path).flat
    here = Run.open(run.path).training.model.instruction_set
    line = f"The checkpoint was saved with {OTHER}, and this CPU computes with {here}: the results"
    assert printed.count(line) == 1
    with another_cpu():
        assert "The checkpoint was saved" not in cli("train --resume", tmp_path / "same").out


def test_verify_names_the_cpu_of_a_checkpoint_that_cannot_be_reproduced(tmp_path, monkeypatch):
    with another_cpu():
        run = Run.create(text=TEXT, out=tmp_path / "run", **FIELDS)
        run.train()
    # As if the kernels computed other digits here: the state that was trained differs.
    original, calls = Training.state, itertools.count()

    def state(training):
        captured = original(training)
        captured.state["passes"] = next(calls)
        return captured

    monkeypatch.setattr(Training, "state", state)
    opened = Run.open(run.path)
    verdict = opened.verify()[-1]
    here = opened.training.model.instruction_set
    assert verdict.fault == (
        f"the checkpoint was saved with {OTHER}, and this CPU computes with {here}: "
        "verify it on a CPU like the first"
    )


def test_another_precision_than_that_of_the_checkpoint_is_refused():
    training = new_training()
    list(training.steps(dataclasses.replace(AUTO, precision="bfloat16"), until=2))
    message = "saved in bfloat16, and this run is in float16: set precision='bfloat16'"
    with pytest.raises(InputError, match=message):
        list(new_training().steps(dataclasses.replace(AUTO, precision="float16"), training.state()))


@pytest.mark.parametrize("precision", [7, "float8", ["bfloat16"]])
def test_a_precision_that_this_version_does_not_know_is_refused(precision):
    training = new_training()
    list(training.steps(AUTO, until=2))
    state = training.state()
    state.state["precision"] = precision
    with pytest.raises(InputError, match="which this version does not know"):
        list(new_training().steps(AUTO, state))


@pytest.mark.parametrize("precision", ["auto", "float32", "float16", "bfloat16"])
def test_a_checkpoint_without_these_fields_resumes(precision):
    config = dataclasses.replace(AUTO, precision=precision)
    unbroken, training, resumed = new_training(), new_training(), new_training()
    list(unbroken.steps(config))
    list(training.steps(config, until=2))
    list(resumed.steps(config, without(training.state(), "precision", "instruction_set")))
    assert resumed.model.flat.data.tobytes() == unbroken.model.flat.data.tobytes()


def test_a_run_resumes_on_fewer_cores_without_a_flag(tmp_path, cli):
    run = half_trained(tmp_path / "run")
    file = run.path / "config.json"
    with edited(file) as config:
        config["run"]["threads"] = 4096  # those of a larger machine
    cli.refuses("threads=4096 must be at most", "train --resume", run.path, "--threads 4096")
    assert cli("train --resume", run.path).cells["threads"] == str(threads.max_threads())
    assert Run.open(run.path).is_finished
