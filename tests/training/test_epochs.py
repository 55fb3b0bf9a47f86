"""Epochs: every window once, an uneven end that counts by its windows, the same after a stop."""

import collections

import numpy as np
import pytest

from smallmind import Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.text.dataset import Dataset
from smallmind.training.records import SaveRecord, StepRecord

TEXT = "the cat sat on the mat. the dog sat on the log. " * 40
WINDOWS = (len(TEXT) * 9 // 10 - 1) // 16


def small_training(batch_size=4, **settings):
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 16, 16, 1, 2, seed=1, **settings)
    return Training(model, tokenizer, TEXT, batch_size=batch_size, seed=1)


def starts(dataset, epoch, batches):
    """Where the windows of an epoch start, batch after batch, in a text of rising numbers."""
    count = dataset.epoch_steps(batches) * batches
    found = [dataset.epoch_batch(epoch * count + i, batches) for i in range(count)]
    for ids, targets in found:
        np.testing.assert_array_equal(targets, ids + 1)
        np.testing.assert_array_equal(np.diff(ids, axis=1), 1)
    return [ids[:, 0].tolist() for ids, _ in found]


@pytest.mark.parametrize(
    ("tokens", "batch_size", "batches"), [(1000, 4, 1), (1000, 4, 3), (990, 7, 2), (40, 8, 2)]
)
def test_every_window_comes_once_an_epoch_in_an_order_of_its_own(tokens, batch_size, batches):
    dataset = Dataset(np.arange(tokens, dtype=np.int32), 16, batch_size, seed=1)
    orders = []
    for epoch in range(3):
        rows = starts(dataset, epoch, batches)
        places = [place for batch in rows for place in batch]
        offset = min(places)
        assert sorted(places) == [offset + 16 * i for i in range(dataset.epoch_windows)]
        assert max(places) + 16 < len(dataset.train)
        sizes = [len(batch) for batch in rows]
        assert sizes == sorted(sizes, reverse=True) and max(sizes) <= batch_size
        for step in range(dataset.epoch_steps(batches)):
            made = sum(sizes[step * batches : (step + 1) * batches])
            at = epoch * dataset.epoch_steps(batches) + step + 1
            assert made == dataset.windows_of(at, batches, by_epoch=True) > 0
        orders.append([(place - offset) // 16 for place in places])
    if dataset.epoch_windows > 4:
        assert orders[0] != orders[1] != orders[2] != orders[0] and orders[0] != sorted(orders[0])
    again = Dataset(np.arange(tokens, dtype=np.int32), 16, batch_size, seed=1)
    assert starts(again, 1, batches) == starts(dataset, 1, batches)


def test_another_seed_is_another_order_and_no_part_of_the_text_is_never_seen():
    tokens = np.arange(1000, dtype=np.int32)
    one, other = (starts(Dataset(tokens, 64, 4, seed), 0, 1) for seed in (1, 2))
    assert one != other
    dataset = Dataset(tokens, 64, 4, seed=1)  # 900 to train on: 14 windows leave 3 tokens
    offsets = {min(min(rows) for rows in starts(dataset, epoch, 1)) for epoch in range(20)}
    assert offsets == {0, 1, 2, 3}


def test_uneven_micro_batches_equal_one_large_batch():
    training = small_training(backend="numpy", dtype=np.float64)
    one = small_training(backend="numpy", dtype=np.float64).model
    training.config = TrainingConfig(epochs=1, grad_accum_steps=3)
    last = training.dataset.epoch_steps(3)
    loss = training._accumulate(last, 3)
    batches = [training.dataset.epoch_batch(3 * (last - 1) + i, 3) for i in range(3)]
    assert [len(ids) for ids, _ in batches] == [4, 4, 3]
    ids, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert loss == pytest.approx(one.loss_and_gradients(ids, targets), rel=1e-12)
    np.testing.assert_allclose(training.model.flat.grad, one.flat.grad, atol=1e-14)


def test_a_run_sees_each_window_as_often_as_it_has_epochs(monkeypatch):
    training, seen = small_training(), collections.Counter()
    honest = training.model.loss_and_gradients

    def loss_and_gradients(ids, targets, scale):
        seen.update(row.tobytes() for row in ids)
        return honest(ids, targets, scale)

    monkeypatch.setattr(training.model, "loss_and_gradients", loss_and_gradients)
    records = training.train(steps=5, epochs=2, grad_accum_steps=3, val_every=0, log_every=1)
    assert sum(seen.values()) == 2 * WINDOWS
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert len(steps) == training.config.steps == 2 * 9
    assert [record.windows for record in steps[:9]] == [12] * 8 + [WINDOWS - 96]


def test_steps_of_fixed_shape_rent_nothing_new():
    training = small_training()
    pool, misses = training.model.workspace.pool, []
    for record in training.steps(TrainingConfig(epochs=3, val_every=0, log_every=1)):
        if isinstance(record, StepRecord):
            misses.append(pool.statistics().misses)
    epoch = training.dataset.epoch_steps(1)
    assert misses[0] == misses[epoch - 2]  # up to the uneven end of the first epoch
    assert misses[epoch - 1] == misses[-1]  # and from there on


def test_a_text_smaller_than_a_batch():
    training = small_training(batch_size=500)
    config = TrainingConfig(
        epochs=3, val_batches=1, check_gradient_health=True, diagnostic_interval=1
    )
    list(training.steps(config))
    assert training.progress.step == 3


@pytest.mark.parametrize("step", [3, 7, 9, 12])
def test_a_run_goes_on_within_an_epoch(step):
    config = TrainingConfig(epochs=2, grad_accum_steps=3, val_every=5, val_batches=1, save_every=1)
    whole, first, rest = (small_training(dropout=0.1) for _ in range(3))
    list(whole.steps(config))
    for record in first.steps(config):
        if isinstance(record, SaveRecord) and record.step == step:
            break
    list(rest.steps(config, first.checkpoint()))
    assert rest.model.flat.data.tobytes() == whole.model.flat.data.tobytes()
