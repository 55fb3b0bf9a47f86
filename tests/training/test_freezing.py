"""Runs that train a part of their model: bits, checkpoints, resuming, rollbacks."""

import json

import numpy as np
import pytest

from smallmind import AdamW, InputError, Precision, Run, TrainingConfig, TransformerModel
from smallmind.files import safetensors
from smallmind.kernels.number_types import BFLOAT16, round_to, to_float32
from smallmind.text.samplers import RandomWindows, draw
from smallmind.training import checkpoint
from smallmind.training.records import HealthRecord, RollbackRecord, StepRecord
from smallmind.training.state import RunState
from tests.programs import CATS
from tests.training import test_resume
from tests.training.small import at_each_pass
from tests.training.test_resume import assert_resumes_whole

BELOW = "embedding,blocks.0-1"
STEPS = {"steps": 8, "val_every": 4, "val_batches": 2, "save_every": 4, "log_every": 1}
STEPS |= {"warmup_steps": 2}


def new_training(backend="numba", **settings):
    return test_resume.new_training(n_layer=4, n_embd=32, backend=backend, **settings)


def config(freeze=BELOW, **settings):
    return TrainingConfig(**{**STEPS, "freeze": freeze, **settings})


def train(training, settings, state=None, until=None):
    return list(training.steps(settings, state, until))


def values(training):
    return {name: value.copy() for name, value in training.model.parameters.items()}


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_run_is_that_of_a_model_whose_other_weights_are_put_back(backend):
    """Without clipping: the norm is summed in another order."""
    frozen, whole = new_training(backend), new_training(backend)
    before = values(frozen)
    losses = [x.loss for x in train(frozen, config(max_grad_norm=0)) if isinstance(x, StepRecord)]
    model, rates = whole.model, frozen.schedule
    optimizer, sampler = AdamW(model), RandomWindows(whole.data)
    for step in range(8):
        ids, targets, *_ = draw(sampler, step)
        assert model.loss_and_gradients(ids, targets) == losses[step]
        optimizer.learning_rate = rates.lr(step)
        optimizer.step()
        for name in model.parameters.keys() - frozen.model.gradients.keys():
            model.parameters[name][...] = before[name]
    for name, value in frozen.model.parameters.items():
        np.testing.assert_array_equal(value, model.parameters[name], name)
        assert np.array_equal(value, before[name]) == (name not in frozen.model.gradients)


def test_what_was_frozen_by_hand_stays_frozen():
    training = new_training()
    training.model.freeze("embedding")
    before = training.model.parameters["token_embedding.weight"].copy()
    training.train(steps=2, val_every=0)
    assert training.model.frozen == "embedding"
    np.testing.assert_array_equal(training.model.parameters["token_embedding.weight"], before)


def test_clipping_health_and_anomalies_see_what_is_trained():
    training = new_training()
    settings = config(
        max_grad_norm=0.1, check_gradient_health=True, diagnostic_interval=1, detect_anomaly=True
    )
    records = train(training, settings, until=1)
    (record,) = [each for each in records if isinstance(each, StepRecord)]
    (health,) = [each for each in records if isinstance(each, HealthRecord)]
    assert set(health.update_ratios) <= set(training.model.gradients)
    assert not [each for each in health.findings if each.name.startswith(("token", "blocks.0"))]
    plain = new_training("numpy")
    plain.model.loss_and_gradients(*draw(RandomWindows(plain.data), 0)[:2])
    squares = [(plain.model.gradients[name] ** 2).sum() for name in training.model.gradients]
    assert record.grad_norm == pytest.approx(sum(squares) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "q8_0", "q4_0"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumes_with_the_same_bits(tmp_path, precision, optimizer):
    settings = config(precision=precision, optimizer=optimizer)
    whole, resumed, _ = assert_resumes_whole(new_training, settings, [5], tmp_path)
    assert resumed.spikes.held_bytes == whole.spikes.held_bytes


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "q8_0", "q4_0"])
def test_a_checkpoint_has_every_weight_once(tmp_path, precision):
    training = new_training(snapshot_every=4)
    train(training, config(precision=precision), until=6)
    checkpoint.save(tmp_path, training.state())
    (path,) = (tmp_path / "checkpoints").iterdir()
    tensors, _ = safetensors.read(path)
    flat = training.model.flat
    for spec in flat.specs:
        assert tensors[f"model.{spec.name}"].dtype == np.float32
        assert (f"snapshot.model.{spec.name}" in tensors) == spec.trainable
    assert tensors["optimizer.m"].size == flat.data.size < flat.padded_count
    loaded = TransformerModel.load(path)  # as any version does
    for name, value in training.model.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[name], value)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "q8_0"])
def test_a_snapshot_shares_what_is_frozen(precision):
    training, whole = new_training(), new_training()
    train(training, config(precision=precision))
    train(whole, config(None, precision=Precision(precision).of_trained))
    held = training.spikes.good.tensors
    for spec in training.model.flat.specs:
        own = training.model.flat.stored[spec.name]
        assert np.shares_memory(held[f"model.{spec.name}"], own) != spec.trainable
    trained = sum(spec.size for spec in training.model.flat.trained)
    moments = sum(tensor.nbytes for tensor in training.optimizer.tensors().values())
    assert training.spikes.held_bytes == 4 * trained + moments < whole.spikes.held_bytes


@pytest.mark.parametrize("precision", ["float32", "float16", "q4_0"])
def test_a_spike_restores_what_is_trained(precision):
    training = new_training(snapshot_every=2)

    def spike(_):
        return 1e3 if training.progress.step == 4 and not training.spikes.rollbacks else None

    at_each_pass(training.model, after=spike)
    rounded = None
    for record in training.steps(config(precision=precision)):
        rounded = rounded or values(training)
        if isinstance(record, RollbackRecord):
            assert record.spike_step == 5
    assert training.spikes.rollbacks == 1
    for name in training.model.parameters.keys() - training.model.gradients.keys():
        np.testing.assert_array_equal(training.model.parameters[name], rounded[name])


def test_training_that_is_undone_leaves_the_model_whole():
    training = new_training()
    before = values(training)
    with training.preserved():
        train(training, config(precision="bfloat16"), until=2)
        assert training.model.frozen
    assert training.model.frozen is None
    for name, value in training.model.parameters.items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("damage", ["lacks a tensor", "null", "list"])
def test_a_state_with_a_malformed_snapshot_is_refused(damage):
    training = new_training(snapshot_every=4)
    train(training, config(), until=6)
    whole = training.state()
    if damage == "lacks a tensor":
        whole.state["snapshot"]["shared"].append("model.nothing")
    else:
        whole.state["snapshot"] = {"null": None, "list": [1]}[damage]
    with pytest.raises(InputError, match="malformed snapshot"):
        new_training().load_state(RunState(6, whole.tensors, whole.state))


SMALL = {"recipe": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 2, "block_size": 16}
SMALL |= {"batch_size": 3, "threads": 1}


def test_a_run_is_created_resumed_and_built_upon(tmp_path):
    whole = Run.create(text=CATS, out=tmp_path / "whole", **SMALL, **STEPS, freeze=BELOW)
    before = {name: value.copy() for name, value in whole.training.model.parameters.items()}
    whole.train()
    saved = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert BELOW in json.dumps(saved)
    part = Run.create(text=CATS, out=tmp_path / "part", **SMALL, **STEPS, freeze=BELOW)
    part.train(lambda record: part.stop() if record.step >= 5 else None)
    Run.open(tmp_path / "part").resume()
    models = [Run.open(tmp_path / name).load()[0] for name in ("whole", "part")]
    trained = set(whole.training.model.gradients)
    for name, value in models[0].parameters.items():
        np.testing.assert_array_equal(value, models[1].parameters[name])
        assert np.array_equal(value, before[name]) == (name not in trained)
    settings = {**STEPS, "recipe": "gpt2", "threads": 1, "precision": "bfloat16"}
    settings |= {"init_from": str(tmp_path / "whole"), "freeze": "embedding,blocks.0-3"}
    Run.create(text=CATS, out=tmp_path / "tuned", **settings).train()
    model, _ = Run.open(tmp_path / "tuned").load()
    for name, value in model.parameters.items():
        expected = to_float32(round_to(models[0].parameters[name], BFLOAT16))
        assert np.array_equal(value, expected) == (not name.startswith("final_norm"))


@pytest.mark.parametrize("precision", ["q8_0", "q4_0"])
def test_a_run_on_frozen_blocks_of_integers(tmp_path, precision):
    """It ends with the weights of one that trains the same part beside what the blocks hold."""
    fields = {**SMALL, **STEPS, "n_embd": 32}
    Run.create(text=CATS, out=tmp_path / "base", **fields).train()
    fields = {**STEPS, "recipe": "gpt2", "threads": 1, "init_from": str(tmp_path / "base")}
    fields |= {"freeze": BELOW, "precision": precision}
    run = Run.create(text=CATS, out=tmp_path / "tuned", **fields)
    run.train(lambda record: run.stop() if record.step >= 5 else None)
    Run.open(tmp_path / "tuned").resume()
    assert not any(verdict.fault for verdict in Run.open(tmp_path / "tuned").verify())
    blocks = run.training.model.parameters
    tuned, base = (Run.open(tmp_path / name).load()[0] for name in ("tuned", "base"))
    for name, value in tuned.parameters.items():
        if name not in run.training.model.gradients:
            np.testing.assert_array_equal(value, blocks[name])
            assert np.abs(value - base.parameters[name]).max() < 0.2 * np.abs(value).max()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "q8_0"])
def test_what_is_frozen_begins_with_the_values_of_the_seed(tmp_path, precision):
    fields = {**SMALL, **STEPS, "n_embd": 32, "freeze": BELOW}
    runs = [
        Run.create(text=CATS, out=tmp_path / place, **{**fields, "precision": kind})
        for kind, place in (("float32", "exact"), (precision, "found"))
    ]
    exact, found = (run.training.model.parameters for run in runs)
    for name, value in exact.items():
        assert np.abs(found[name] - value).max() <= np.abs(value).max() / 100


@pytest.mark.parametrize("precision", ["q8_0", "q4_0"])
def test_a_run_that_trains_all_weights_has_no_blocks(tmp_path, precision):
    with pytest.raises(InputError, match=f"precision='{precision}' is only for frozen weights"):
        Run.create(text=CATS, out=tmp_path / "run", **SMALL, precision=precision)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("freeze", ["blocks.4", "attention", "embedding,blocks.0-3,final_norm"])
def test_a_run_with_parts_that_the_model_does_not_have_is_not_created(tmp_path, freeze):
    with pytest.raises(InputError, match="freeze="):
        Run.create(text=CATS, out=tmp_path / "run", **SMALL, freeze=freeze)
    assert not (tmp_path / "run").exists()
