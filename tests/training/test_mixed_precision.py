"""Training in 16 bits: an overflow costs one step and nothing else."""

import io
import json

import numpy as np
import pytest

from smallmind import InputError, TrainingConfig, TransformerModel
from smallmind.cli.console import Console
from smallmind.cli.display import ProgressDisplay
from smallmind.settings.config import Precision
from smallmind.training.records import OverflowRecord, StepRecord
from tests.training.small import at_each_pass, small_training


def spoil(training, at_passes):
    """Plants an infinity in the gradient of a parameter in some passes, counted from 1."""
    gradient = training.model.gradients["blocks.1.mlp.expansion.weight"]

    def plant(number):
        if number in at_passes:
            gradient.flat[3] = np.inf

    at_each_pass(training.model, after=plant)


def state(training):
    optimizer = training.optimizer
    flat = training.model.flat
    arrays = flat.data, flat.copies[0].values, optimizer.m, optimizer.v
    return optimizer.steps, [array.copy() for array in arrays]


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_loss_falls_as_in_float32(precision):
    losses = {}
    for each in ("float32", precision):
        training = small_training(seed=5)
        records = training.train(60, log_every=1, val_every=0, precision=each)
        assert (training.scaler is None) == (each != "float16")
        losses[each] = np.array([record.loss for record in records])
    assert losses["float32"][-1] < 0.8 * losses["float32"][0]
    np.testing.assert_allclose(losses[precision], losses["float32"], rtol=0.02)
    assert (losses[precision] != losses["float32"]).any()


def test_an_overflow_changes_only_the_loss_scale():
    training = small_training(seed=5)
    spoil(training, at_passes={4})
    before = None
    for record in training.steps(
        TrainingConfig(steps=6, log_every=1, val_every=0, use_mixed_precision=True)
    ):
        if record.step == 3:
            before = state(training)
            assert training.scaler.scale == 65536
        if record.step == 4:
            assert record == OverflowRecord(4, 32768.0)
            steps, arrays = state(training)
            assert steps == before[0] == 3
            for array, expected in zip(arrays, before[1], strict=True):
                np.testing.assert_array_equal(array, expected)
            assert not training.model.flat.grad.any()
        if record.step == 5:
            assert isinstance(record, StepRecord) and training.optimizer.steps == 4
    assert training.scaler.scale == 32768


def test_accumulation_sees_an_overflow_in_any_of_its_batches():
    training = small_training(seed=5)
    spoil(training, at_passes={5})  # the second batch of the second step
    records = training.train(
        4, log_every=1, val_every=0, use_mixed_precision=True, grad_accum_steps=3
    )
    assert [isinstance(record, OverflowRecord) for record in records] == [False, True, False, False]


def test_ten_overflows_in_a_row_end_the_run_and_name_the_first():
    training = small_training(seed=5)
    spoil(training, at_passes=range(3, 99))
    start = None
    message = "10 gradients in a row overflowed float16.*scale of 64; blocks.1.mlp.expansion.weight"
    with pytest.raises(FloatingPointError, match=message):
        for record in training.steps(
            TrainingConfig(steps=99, log_every=1, val_every=0, precision="float16")
        ):
            if record.step == 2:
                start = training.model.flat.data.copy()
    np.testing.assert_array_equal(training.model.flat.data, start)


def test_a_loss_scale_that_keeps_falling_names_the_largest_gradients():
    training = small_training(seed=5)
    spoil(training, at_passes={2, 4, 6, 8, 10})
    records = training.train(10, log_every=1, val_every=0, precision="float16")
    overflows = [record for record in records if isinstance(record, OverflowRecord)]
    assert [type(record) for record in overflows[:4]] == [OverflowRecord] * 4
    assert overflows[4].largest_gradients.startswith("blocks.1.mlp.expansion.weight (norm inf), ")
    assert overflows[4].largest_gradients.count("(norm ") == 3
    stream = io.StringIO()
    ProgressDisplay(Console(stream), 10).show(overflows[4])
    assert "was halved 5 times in 200 steps. The largest" in " ".join(stream.getvalue().split())


def test_finite_gradients_whose_squares_overflow_float32_do_not_end_the_run():
    training = small_training(seed=5)
    at_each_pass(training.model, after=lambda _: training.model.flat.grad[:8].fill(1e30))
    training.train(3, val_every=0, precision="float16")
    assert training.progress.step == 3 and training.scaler.skips == 0
    assert np.isfinite(training.model.flat.data).all()


def test_a_real_overflow_finds_its_scale():
    """Weights so large that gradients times 65536 overflow float16, and at a lower scale do not."""
    training = small_training(seed=5)
    training.model.parameters["final_norm.weight"][...] = 60
    records = training.train(12, log_every=1, val_every=0, precision="float16", learning_rate=1e-5)
    overflows = [isinstance(record, OverflowRecord) for record in records]
    assert overflows[0] and not overflows[-1]
    assert overflows == sorted(overflows, reverse=True)  # none after the first that fits


def test_use_mixed_precision_and_precision_are_combined():
    assert TrainingConfig().requested_precision == Precision.FLOAT32
    assert TrainingConfig(use_mixed_precision=True).requested_precision == Precision.FLOAT16
    assert TrainingConfig(precision="bfloat16").requested_precision == Precision.BFLOAT16
    assert (
        TrainingConfig(use_mixed_precision=True, precision="float16").requested_precision
        == "float16"
    )
    with pytest.raises(InputError, match="contradicts use_mixed_precision=True"):
        TrainingConfig(use_mixed_precision=True, precision="bfloat16")
    with pytest.raises(InputError, match="must be one of float32, float16, bfloat16, auto"):
        TrainingConfig(precision="float8")


def test_the_command_line_says_that_a_step_was_skipped(text, tmp_path, monkeypatch, cli):
    original = TransformerModel.loss_and_gradients
    calls = 0

    def loss_and_gradients(self, *arguments):
        nonlocal calls
        calls += self.backend != "none"  # not in the estimate's dry run
        loss = original(self, *arguments)
        if calls == 2:
            self.flat.grad[0] = np.nan
        return loss

    monkeypatch.setattr(TransformerModel, "loss_and_gradients", loss_and_gradients)
    shape = "--block-size 16 --n-embd 16 --n-layer 1 --n-head 2 --steps 4 --val-every 0"
    printed = cli("train", text, shape, "--use-mixed-precision --out", tmp_path / "run").out
    assert "Step 2: Gradient overflow detected, skipping update. Loss scale: 32768" in printed
    assert "float16" in printed
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (skipped,) = (x for x in map(json.loads, lines) if x["kind"] == "overflow")
    assert (skipped["step"], skipped["loss_scale"]) == (2, 32768.0)
