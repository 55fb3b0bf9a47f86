"""Epochs: every window once, an uneven end weighted by its windows, the same when resumed."""

import collections
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import TrainingConfig
from smallmind.losses.cross_entropy import CrossEntropy
from smallmind.randomness import permuted
from smallmind.text import samplers
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import Epochs, draw
from smallmind.training.gradients import accumulate_gradients
from smallmind.training.records import StepRecord
from tests.training import small
from tests.training.test_resume import assert_resumes_whole

small_training = partial(small.small_training, seed=1, model_seed=1, n_embd=16, n_layer=1)
WINDOWS = (len(small.TEXT) * 9 // 10 - 1) // 16


def starts(sampler, epoch):
    """Where the windows of an epoch start, batch by batch, in a text of consecutive numbers."""
    count = sampler.steps * sampler.batches
    found = [draw(sampler, epoch * count + i) for i in range(count)]
    for batch in found:
        np.testing.assert_array_equal(batch.targets, batch.ids + 1)
        np.testing.assert_array_equal(np.diff(batch.ids, axis=1), 1)
        np.testing.assert_array_equal(batch.ids[:, 0], batch.starts)
    return [batch.starts.tolist() for batch in found]


def sampler_of(tokens, block_size, batch_size, batches=1, seed=1):
    dataset = Dataset(np.arange(tokens, dtype=np.int32), block_size, batch_size, seed)
    return Epochs(dataset, batches)


@pytest.mark.parametrize("most", [samplers.MAX_SHUFFLED, 1])
@pytest.mark.parametrize(
    ("tokens", "batch_size", "batches"),
    [(1000, 4, 1), (1000, 4, 3), (990, 7, 2), (40, 8, 2), (41, 8, 2)],
)
def test_every_window_appears_once_per_epoch_in_a_new_order(
    monkeypatch, most, tokens, batch_size, batches
):
    """Also in epochs too long to shuffle."""
    monkeypatch.setattr(samplers, "MAX_SHUFFLED", most)
    sampler, orders = sampler_of(tokens, 16, batch_size, batches), []
    per_epoch = sampler.steps * batches
    for epoch in range(4):
        rows = starts(sampler, epoch)
        places = [place for batch in rows for place in batch]
        offset = min(places)
        assert sorted(places) == [offset + 16 * i for i in range(sampler.windows)]
        assert offset < 16 and max(places) + 16 < len(sampler.dataset.train)
        sizes = [len(batch) for batch in rows]
        assert sizes == sorted(sizes, reverse=True) and max(sizes) <= batch_size
        assert max(sizes) == sampler.max_batch_size
        for step in range(sampler.steps):
            made = sum(sizes[step * batches : (step + 1) * batches])
            assert made == sampler.windows_in_step(epoch * sampler.steps + step + 1) > 0
        orders.append(tuple((place - offset) // 16 for place in places))
        for i in reversed(range(per_epoch)):  # each is found by itself, in any order
            alone = sampler_of(tokens, 16, batch_size, batches).starts(epoch * per_epoch + i)
            assert alone.tolist() == rows[i]
    if sampler.windows > 4:
        assert len(set(orders)) == 4 and list(orders[0]) != sorted(orders[0])
    if most == 1:
        assert not sampler._shuffled[1].size  # no order of all windows was made


def test_another_seed_gives_another_order_and_the_whole_text_is_seen():
    one, other = (starts(sampler_of(1000, 64, 4, seed=seed), 0) for seed in (1, 2))
    assert one != other
    sampler = sampler_of(1000, 64, 4)  # 900 to train on: 14 windows leave 3 tokens
    offsets = {min(min(rows) for rows in starts(sampler, epoch)) for epoch in range(20)}
    assert offsets == {0, 1, 2, 3}


def test_uneven_micro_batches_equal_one_large_batch():
    training = small_training(backend="numpy", dtype=np.float64)
    model, one = training.model, small_training(backend="numpy", dtype=np.float64).model
    sampler = Epochs(training.data, batches=3)
    last = sampler.steps
    loss, weight = accumulate_gradients(
        model, sampler, last, CrossEntropy(), partial(draw, sampler)
    )
    batches = [draw(sampler, 3 * (last - 1) + i) for i in range(3)]
    assert [len(batch.ids) for batch in batches] == [4, 4, 3]
    ids, targets = (np.concatenate(parts) for parts in list(zip(*batches, strict=True))[:2])
    assert loss == pytest.approx(one.loss_and_gradients(ids, targets), rel=1e-12)
    assert weight == len(ids)
    np.testing.assert_allclose(training.model.flat.grad, one.flat.grad, atol=1e-14)


def test_a_run_sees_each_window_once_per_epoch(monkeypatch):
    training, seen = small_training(), collections.Counter()
    original = training.model.loss_and_gradients

    def loss_and_gradients(ids, *arguments):
        seen.update(row.tobytes() for row in ids)
        return original(ids, *arguments)

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
    epoch = Epochs(training.data).steps
    assert misses[0] == misses[epoch - 2]  # up to the uneven end of the first epoch
    assert misses[epoch - 1] == misses[-1]  # and from then on


def test_a_text_smaller_than_a_batch_can_be_trained_on():
    training = small_training(batch_size=500)
    config = TrainingConfig(
        epochs=3, val_batches=1, check_gradient_health=True, diagnostic_interval=1
    )
    list(training.steps(config))
    assert training.progress.step == 3


def test_a_run_is_resumed_within_an_epoch(tmp_path):
    config = TrainingConfig(epochs=2, grad_accum_steps=3, val_every=5, val_batches=1, save_every=1)
    build = partial(small_training, dropout=0.1)
    assert_resumes_whole(build, config, [3, 7, 9, 12], tmp_path)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000) | st.sampled_from([2**k + d for k in range(1, 13) for d in (-1, 0, 1)]))
def test_places_are_permuted_whatever_their_number(n):
    order = permuted(np.arange(n), n, n)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))
    some = np.arange(n)[:: max(1, n // 7)]
    np.testing.assert_array_equal(permuted(some, n, n), order[some])
    if n > 20:
        assert not np.array_equal(order, permuted(np.arange(n), n, n + 1))
        assert np.abs(np.corrcoef(np.arange(n), order)[0, 1]) < 6 / n**0.5


def test_a_part_of_a_permutation_of_very_many_places_is_computed_by_itself():
    n = 10**12 + 39
    places = np.concatenate([np.arange(1000), n - 1 - np.arange(1000)])
    order = permuted(places, n, 1)
    assert len(set(order.tolist())) == 2000 and order.min() >= 0 and order.max() < n
    assert len(permuted(np.empty(0, np.int64), n, 1)) == 0
