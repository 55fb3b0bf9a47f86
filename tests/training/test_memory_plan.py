"""Changes that make a run fit: each with the estimate of exactly those settings."""

import pytest

from smallmind.forecast.memory import (
    FLOAT16_SETTINGS,
    RECOMPUTE,
    TYPICAL,
    MemoryPlan,
    estimate,
)
from smallmind.settings.config import ModelConfig, RunConfig, TrainingConfig
from smallmind.settings.settings import Settings

PROGRAM = TYPICAL.resident
MODEL = ModelConfig(block_size=512)


def plan(batch_size=16, threads=2, backend="numba", model=MODEL, **settings):
    run = RunConfig(batch_size=batch_size, threads=threads, backend=backend)
    return MemoryPlan(Settings(model, TrainingConfig(**settings), run))


def test_a_plan_is_estimated_with_its_own_batch_and_threads():
    expected = estimate(MODEL, TrainingConfig(micro_batch_size=3), 7, threads=2)
    assert plan(7, micro_batch_size=3).estimate == expected
    assert plan(7, threads=5).estimate.scratch == 5 * plan(7, threads=1).estimate.scratch


def test_a_change_reaches_the_config_that_has_the_field():
    changed = plan().changed(block_size=64, precision="float16", batch_size=3).settings
    assert changed.model.block_size == 64 and changed.training.precision == "float16"
    assert changed.run.batch_size == 3 and changed.model.n_embd == MODEL.n_embd
    assert plan().change(batch_size=3).total == plan(3).estimate.total


def test_the_largest_batch_that_fits():
    memory = 400 * 2**20
    windows = plan().largest_batch(memory)

    def total(windows):
        return plan(windows, micro_batch_size=windows).estimate.total

    assert total(windows) <= memory < total(windows + 1)
    assert plan().largest_batch(total(windows)) == windows
    assert plan().largest_batch(total(windows) - 1) == windows - 1
    assert plan().largest_batch(1) == 0
    small = plan(**FLOAT16_SETTINGS, **RECOMPUTE)
    assert small.largest_batch(memory) >= 3 * windows


@pytest.mark.parametrize("batch", [1, 7, 16, 61])
def test_the_largest_micro_batch(batch):
    totals = {n: plan(batch, micro_batch_size=n).estimate.total for n in range(1, batch + 1)}
    for memory in sorted(totals.values()):
        largest = plan(batch).max_micro_batch(memory)
        assert totals[largest] <= memory
        # No smaller number of passes fits.
        passes = -(-batch // largest)
        assert all(totals[-(-batch // fewer)] > memory for fewer in range(1, passes))
    assert plan(batch).max_micro_batch(min(totals.values()) - 1) == 0


def test_a_smaller_micro_batch_is_the_first_advice():
    whole = plan(micro_batch_size=16)
    [change] = whole.changes_to_fit(whole.estimate.total - 1)
    assert change.settings == {"micro_batch_size": 8}
    assert change.total == plan(micro_batch_size=8).estimate.total


def test_advice_if_not_even_one_sequence_fits():
    one = plan(micro_batch_size=1).estimate.total
    changes = {tuple(sorted(change.settings)): change for change in plan().changes_to_fit(one - 1)}
    once = {"micro_batch_size": 1}
    expected = [
        once | FLOAT16_SETTINGS,
        once | RECOMPUTE,
        once | FLOAT16_SETTINGS | RECOMPUTE,
        once | {"block_size": 256},
        once | {"n_embd": 64},
    ]
    assert [change.settings for change in changes.values()] == expected
    for change in changes.values():
        assert change.total == plan().changed(**change.settings).estimate.total < one


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"precision": "bfloat16"}, RECOMPUTE),
        ({"use_mixed_precision": True}, RECOMPUTE),
        ({"backend": "numpy"}, RECOMPUTE),
        (RECOMPUTE, FLOAT16_SETTINGS),
        ({**FLOAT16_SETTINGS, **RECOMPUTE}, {"block_size": 256}),
    ],
)
def test_nothing_in_use_already_or_impossible_is_advised(settings, first):
    one = plan(micro_batch_size=1, **settings).estimate.total
    changes = [change.settings for change in plan(**settings).changes_to_fit(one - 1)]
    assert changes[0] == {"micro_batch_size": 1, **first}
    assert any("precision" in change for change in changes) == (first == FLOAT16_SETTINGS)


def test_an_advised_smaller_model_can_be_built():
    wide = plan(model=ModelConfig(n_embd=132, n_head=12, block_size=512))
    memory = wide.change(micro_batch_size=1, n_embd=24).total
    change = wide.changes_to_fit(memory)[-1]
    assert change.settings == {"micro_batch_size": 1, "n_embd": 24} and change.total == memory


def test_nothing_fits_in_less_than_the_program():
    assert all(change.total > PROGRAM for change in plan().changes_to_fit(PROGRAM))
    assert not any("block_size" in change.settings for change in plan().changes_to_fit(PROGRAM))
