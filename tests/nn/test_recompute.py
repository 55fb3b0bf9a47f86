"""Recompute runs each segment forward again, and holds what its formulas say."""

import math

import numpy as np
import pytest

from smallmind import CheckpointManager, CheckpointStrategy, InputError, TransformerModel
from smallmind.nn.block import Block
from tests.peaks import rented_at_the_peak

B, T = 2, 16


def deep_model(n_layer=5, dropout=0.2, **settings):
    return TransformerModel(11, T, 64, n_layer, 2, dropout=dropout, **settings)


def batch(seed=0):
    data = np.random.default_rng(seed).integers(0, 11, (B, T + 1)).astype(np.int32)
    return data[:, :-1], data[:, 1:]


def gradients(model, manager):
    model.use_checkpointing(manager)
    model.zero_gradients()
    model.passes = 3
    loss = model.loss_and_gradients(*batch())
    return loss, model.flat.grad.copy()


def test_each_pass_drops_different_activations():
    """Otherwise recompute would give the same bits with a mask that never changes."""
    model = deep_model()
    _, first = gradients(model, CheckpointManager(1))
    model.zero_gradients()
    model.loss_and_gradients(*batch())
    assert (model.flat.grad != first).any()


def test_segments_divide_the_blocks_by_strategy():
    assert CheckpointManager(enabled=False).segments(5) == [range(5)]
    assert CheckpointManager(1).segments(3) == [range(1), range(1, 2), range(2, 3)]
    assert CheckpointManager(checkpoint_interval=2).segments(5) == [
        range(2),
        range(2, 4),
        range(4, 5),
    ]
    assert CheckpointManager().segments(7)[0] == range(3)

    def lengths(strategy, n_layer, interval=3):
        manager = CheckpointManager.of(strategy, n_layer, interval)
        return [len(segment) for segment in manager.segments(n_layer)]

    assert lengths(CheckpointStrategy.NONE, 16) == [16]
    assert lengths(CheckpointStrategy.EVERY_LAYER, 16) == [1] * 16
    assert lengths(CheckpointStrategy.SQRT_LAYERS, 16) == [4] * 4
    assert lengths(CheckpointStrategy.SQRT_LAYERS, 1) == [1]
    assert lengths("custom", 16, 6) == [6, 6, 4]
    with pytest.raises(InputError, match="checkpoint_interval=0 must be at least 1"):
        CheckpointManager(0)


def bytes_at_the_peak(strategy, n_layer, monkeypatch, run):
    model = deep_model(n_layer)
    model.use_checkpointing(CheckpointManager.of(strategy, n_layer))
    return rented_at_the_peak(monkeypatch, model, run)


def test_peak_memory_matches_the_formulas(monkeypatch):
    N = 16

    def peak(strategy, n_layer=N):
        return bytes_at_the_peak(
            strategy, n_layer, monkeypatch, lambda model: model.loss_and_gradients(*batch())
        )

    none = peak(CheckpointStrategy.NONE)
    block = (none - peak(CheckpointStrategy.NONE, 1)) / (N - 1)
    rest = none - N * block
    one_input = B * T * 64 * 4
    expected = {
        CheckpointStrategy.EVERY_LAYER: (N - 1) * one_input + block,
        CheckpointStrategy.SQRT_LAYERS: (math.sqrt(N) - 1) * one_input + math.sqrt(N) * block,
    }
    for strategy, formula in expected.items():
        assert peak(strategy) == pytest.approx(formula + rest, rel=0.05), strategy
    assert peak(CheckpointStrategy.EVERY_LAYER) <= 0.2 * none
    assert peak(CheckpointStrategy.SQRT_LAYERS) <= 0.4 * none


def test_nothing_is_kept_without_a_backward_pass(monkeypatch):
    def peak(n_layer):
        return bytes_at_the_peak(
            CheckpointStrategy.NONE, n_layer, monkeypatch, lambda model: model.losses(*batch())
        )

    assert peak(8) == peak(2)


def test_every_segment_but_the_last_runs_forward_again(monkeypatch):
    forwards, again = [], []
    forward, recompute = Block.forward, Block.recompute

    def counted(calls, method):
        def call(self, x):
            calls.append(self)
            return method(self, x)

        return call

    monkeypatch.setattr(Block, "forward", counted(forwards, forward))
    monkeypatch.setattr(Block, "recompute", counted(again, recompute))
    model = deep_model(n_layer=5)
    gradients(model, CheckpointManager(2))
    # Two segments of two and one of one: the second block of each needs no result.
    assert forwards == [*model.blocks, model.blocks[2], model.blocks[0]]
    assert again == [model.blocks[3], model.blocks[1]]
