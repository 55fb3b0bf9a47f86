"""Shards without other ranks: the same updates as those of whole batches, but for rounding."""

import numpy as np
import pytest

from smallmind import Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.forecast.memory import TextSize, estimate
from smallmind.nn.workspace import Pass
from smallmind.settings.config import ModelConfig
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.samplers import RandomWindows, draw, make_sampler
from smallmind.training.records import EvaluationRecord, StepRecord
from tests.training.test_memory_estimate import SmallRun

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 20
STEPS = {"steps": 6, "val_every": 3, "val_batches": 2, "log_every": 1, "warmup_steps": 2}


def new_training(batch_size=8, dropout=0.1, **settings):
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(
        tokenizer.vocab_size, 16, 16, 2, 2, dropout=dropout, seed=3, **settings
    )
    return Training(model, tokenizer, TEXT, batch_size=batch_size, seed=5)


def trained(batch_size=8, arch=None, **settings):
    training = new_training(batch_size, **(ARCHITECTURES[arch] if arch else {}))
    records = list(training.steps(TrainingConfig(**{**STEPS, **settings})))
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    losses += [record.val_loss for record in records if isinstance(record, EvaluationRecord)]
    return training, losses


def assert_same_tensors(first, second):
    tensors = second.state().tensors
    for name, tensor in first.state().tensors.items():
        np.testing.assert_array_equal(tensor, tensors[name], name)


@pytest.mark.parametrize(
    ("arch", "batch_size", "length"),
    [
        (None, 8, {}),
        (None, 5, {"grad_accum_steps": 2}),  # three of eight shards are empty
        ("llama", 5, {"epochs": 1}),
        ("modern", 8, {"grad_accum_steps": 2}),
    ],
    ids=str,
)
def test_shards_add_up_to_the_whole_batch(arch, batch_size, length):
    """Dropout included: its masks are those of the whole batch."""
    whole, losses = trained(batch_size, arch, **length)
    for shards in (6, 8):
        divided, losses_of_shards = trained(batch_size, arch, data_shards=shards, **length)
        np.testing.assert_allclose(losses_of_shards, losses, rtol=2e-4)
        difference = np.abs(divided.model.flat.data - whole.model.flat.data)
        assert difference.max() < 1e-2
        assert difference.mean() < 2e-5


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_batch_is_drawn_once_for_all_shards(prefetch, batches, monkeypatch):
    drawn, original = [], RandomWindows.starts
    monkeypatch.setattr(
        RandomWindows, "starts", lambda self, n: drawn.append(n) or original(self, n)
    )
    trained(data_shards=8, grad_accum_steps=batches, prefetch=prefetch)
    assert drawn == list(range(STEPS["steps"] * batches))


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_single_shard_is_the_whole_batch(precision, optimizer):
    settings = {"precision": precision, "optimizer": optimizer, "grad_accum_steps": 2}
    (whole, losses), (one, losses_of_one) = (
        trained(data_shards=shards, **settings) for shards in (None, 1)
    )
    assert losses == losses_of_one
    assert_same_tensors(whole, one)


def test_rounding_does_nothing_to_a_single_shard_and_little_to_several():
    whole, one = (
        trained(data_shards=1, reduce_precision=precision)[0]
        for precision in ("float32", "bfloat16")
    )
    assert_same_tensors(whole, one)
    exact, rounded = (
        trained(data_shards=8, reduce_precision=precision) for precision in ("float32", "bfloat16")
    )
    assert exact[1] != rounded[1]
    np.testing.assert_allclose(rounded[1], exact[1], rtol=5e-3)


def test_the_masks_of_shards_are_those_of_the_whole_batch():
    """Seen in losses, of which each depends on the masks of its window only."""
    training = new_training(dropout=0.5)
    model, sampler = training.model, make_sampler(training.data, TrainingConfig())
    batch = draw(sampler, 0)
    for micro_batch_size in (None, 3):
        model.micro_batch_size = micro_batch_size

        def loss_of(first, last):
            part = batch.part(slice(first, last))
            at = Pass(4, part.first_row)
            return model.loss_and_gradients(part.ids, part.targets, 1.0, at)

        whole = loss_of(0, 8)
        parts = [loss_of(first, last) * (last - first) / 8 for first, last in ((0, 3), (3, 8))]
        np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)
        shifted = [loss_of(first, first + 4) / 2 for first in (0, 4)]
        np.testing.assert_allclose(sum(shifted), whole, rtol=1e-5)
    moved = Pass(4, batch.ids.shape[1])
    found = model.loss_and_gradients(batch.ids, batch.targets, 1.0, moved)
    assert found != pytest.approx(whole, 1e-5)


@pytest.mark.parametrize("rounds", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shards", "batch_size", "length"),
    [
        (2, 4, {"steps": 2}),
        (8, 5, {"steps": 1}),  # some shards are empty
        (6, 16, {"steps": 2, "grad_accum_steps": 2}),
        (8, 7, {"epochs": 1}),
        (8, 50, {"epochs": 1, "micro_batch_size": 3}),
    ],
    ids=str,
)
def test_the_estimate_is_what_shards_hold(shards, batch_size, length, rounds):
    model = ModelConfig(65, 24, 2, 4, 48, dropout=0.1)
    config = TrainingConfig(
        data_shards=shards, reduce_precision=rounds, val_every=1, val_batches=1, **length
    )
    expected = estimate(model, config, batch_size, text=TextSize(900, 900))
    assert expected.activations == SmallRun(model, config, batch_size, 900).held_by_pool
