"""The operations of steps are counted from shapes; a run says what share of the machine it used."""

import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest

from smallmind import ModelConfig, Precision, TrainingConfig, TransformerModel
from smallmind.cli.console import Console
from smallmind.cli.display import show_usage
from smallmind.kernels import timing
from smallmind.kernels.codegen import cache_directory
from smallmind.kernels.description import described
from smallmind.runs.event_file import scalars_of
from smallmind.settings.presets import ARCHITECTURES
from smallmind.training import operations, prefetch
from smallmind.training.gradients import set_up
from smallmind.training.operations import Operations, Usage, count_operations, usage_text
from smallmind.training.records import StepRecord
from tests.training.small import small_training

SHAPE = {"vocab_size": 65, "block_size": 5, "n_embd": 8, "n_layer": 3, "n_head": 2}
B = 2
# Each layer has q, k, v, projection, expansion to 32 and back; then comes the head.
MATRICES = 3 * (4 * 8 * 8 + 2 * 8 * 32) + 65 * 8
ATTENTION = 3 * 5 * 6 * 8  # a product over the causal half, in all layers, two operations each


def test_the_operations_of_a_window_follow_from_its_shapes():
    found = count_operations(ModelConfig(**SHAPE))
    assert found.forward == 2 * MATRICES * 5 + 2 * ATTENTION
    assert found.backward == 4 * MATRICES * 5 + 4 * ATTENTION
    assert found.recompute == ATTENTION  # the scores, by attention's own backward pass
    assert found.update == 0 and found.window == found.forward + found.backward


@pytest.mark.parametrize("strategy", [None, "every_layer", "sqrt_layers"])
@pytest.mark.parametrize(
    "settings",
    [
        *ARCHITECTURES.values(),
        {"n_kv_head": 1, "document_token": 0},
        {"mlp": "relu2", "bigram_rows": 9, "dropout": 0.1},
    ],
)
def test_a_dry_run_counts_what_a_step_calls(settings, strategy):
    config = ModelConfig(**SHAPE | settings)
    training = TrainingConfig(
        steps=1, use_gradient_checkpointing=strategy is not None, checkpoint_strategy=strategy
    )
    model, called = TransformerModel(config, backend="numpy"), []

    def wrap(name, kernel):
        def counted(*arguments, **named):
            if operations := described(name).operations:
                called.append(operations(*arguments, **named))
            return kernel(*arguments, **named)

        return counted

    set_up(model, training, Precision.FLOAT32)
    ids = np.random.default_rng(0).integers(1, 65, (B, 5)).astype(np.int32)
    with model.workspace.wrapped_kernels(wrap):
        model.loss_and_gradients(ids, ids)
    plain, found = count_operations(config), count_operations(config, training)
    assert sum(called) == B * (found.window + found.recompute)
    assert found[:2] == plain[:2]
    assert (found.recompute > plain.recompute) == (strategy is not None)


def test_frozen_parts_have_fewer_operations_and_a_teacher_has_its_own():
    config, teacher = ModelConfig(**SHAPE), ModelConfig(**SHAPE | {"n_layer": 5})
    plain = count_operations(config)
    frozen = count_operations(config, TrainingConfig(steps=1, freeze="embedding,blocks.0-1"))
    assert frozen.forward == plain.forward and frozen.backward < plain.backward
    taught = count_operations(config, None, (teacher,))
    assert taught.forward == plain.forward + count_operations(teacher).forward
    assert count_operations(config, TrainingConfig(steps=1, optimizer="muon")).update > 0


def test_a_run_says_what_its_steps_computed_and_waited(monkeypatch):
    drawn = prefetch.draw

    def slow(*arguments):
        time.sleep(0.01)
        return drawn(*arguments)

    monkeypatch.setattr(prefetch, "draw", slow)
    training = small_training(backend="numpy")
    config = TrainingConfig(steps=6, log_every=2, grad_accum_steps=2, val_every=3, save_every=0)
    records = list(training.steps(config))
    usage = training.usage.record(6)
    each = count_operations(training.model.config)
    assert usage.used_forward == 6 * 2 * 4 * each.forward
    assert usage.used_backward == 6 * 2 * 4 * each.backward
    assert usage.ceiling_gflops is None and usage.used_share is None
    assert usage.used_seconds > usage.used_waiting >= 6 * 2 * 0.01
    assert usage.used_seconds <= training.progress.seconds["total"]
    assert usage.used_gflops == pytest.approx(training.usage.typical_rate / 1e9)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert all(0 < step.waiting_share < 1 and step.gflops > 0 for step in steps)
    tags = [tag for tag, _ in scalars_of(dataclasses.asdict(usage))]
    assert "usage/used_gflops" in tags and "usage/ceiling_gflops" not in tags


def test_the_share_is_that_of_the_ceiling():
    usage = Usage(Operations(10**9, 2 * 10**9, 10**9, 5 * 10**9), ceiling=1e11)
    for _ in range(10):
        usage.count(seconds=0.5, waiting=0.01, windows=4)
    record = usage.record(10)
    # 3 GFLOP for each window and 5 for each update; recompute does not count.
    assert record.used_gflops == pytest.approx((3 * 4 + 5) / 0.5)
    assert record.used_share == pytest.approx(0.34)
    text = usage_text(dataclasses.asdict(record))
    assert "170.0 GFLOP of work at 34 GFLOP/s, 34% of this CPU's float32 peak" in text
    assert "40.0 GFLOP recomputing activations" in text and "; 2.0% of the time" in text
    for wrong in ({}, {**dataclasses.asdict(record), "used_seconds": "x"}):
        assert usage_text(wrong) == ""


def test_a_share_is_never_above_the_whole():
    """The ceiling is then one that other programs have lowered while it was measured."""
    usage = Usage(Operations(10**9, 2 * 10**9, 0, 5 * 10**9), ceiling=1e9)
    usage.count(seconds=0.5, waiting=0.0, windows=4)
    record = usage.record(1)
    assert record.used_share is None and record.ceiling_gflops is None
    text = usage_text(dataclasses.asdict(record))
    assert "at 34 GFLOP/s; 0.0% of the time" in text and "peak" not in text
    earlier = {**dataclasses.asdict(record), "used_share": 4.32, "ceiling_gflops": 4.8}
    assert "432" not in usage_text(earlier) and "4.8 GFLOP/s" not in usage_text(earlier)


def test_the_share_of_a_run_in_16_bits_is_that_of_their_own_ceiling():
    usage = Usage(Operations(10**9, 2 * 10**9, 0, 0), 1e12, "bfloat16")
    usage.count(seconds=0.1, waiting=0.0, windows=4)
    record = dataclasses.asdict(usage.record(1))
    assert "12% of this CPU's bfloat16 peak" in usage_text(record)
    del record["ceiling_precision"]  # a run of an earlier version
    assert "float32 peak" in usage_text(record)


def test_the_best_ceiling_that_was_measured_is_kept(tmp_path, monkeypatch):
    """For each precision and number of threads; a busier machine makes none lower."""
    seconds = iter([0.5, 0.25, 1.0, 0.5])
    monkeypatch.setattr(timing, "turn", lambda *_: [rate])
    monkeypatch.setattr(operations, "run_at_ceiling", lambda _: 1000)
    monkeypatch.setattr(cache_directory, "cache_directory", lambda _: tmp_path)
    found = []
    for precision in ["float32"] * 3 + ["float16"]:
        operations._ceiling.cache_clear()
        rate = next(seconds)
        found.append(operations.multiply_add_ceiling(Precision(precision)))
    operations._ceiling.cache_clear()
    assert found == [(rate, "float32") for rate in (2000.0, 4000.0, 4000.0, 4000.0)]
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])  # damaged: measured again
    rate = 1.0
    assert operations.multiply_add_ceiling(Precision.FLOAT32) == (1000.0, "float32")
    operations._ceiling.cache_clear()


def test_steps_that_other_programs_slowed_down_change_no_share():
    usage = Usage(Operations(10**9, 2 * 10**9, 0, 5 * 10**9), ceiling=1e11)
    for seconds in (30.0, *[0.5] * 20, 7.0):  # it compiles first
        usage.count(seconds=seconds, waiting=0.0, windows=4)
    assert usage.record(22).used_share == pytest.approx(0.34)
    assert usage.record(22).used_seconds == pytest.approx(47)


def test_advice_follows_much_waiting(capsys):
    def shown(waiting):
        usage = Usage(Operations(10**9, 2 * 10**9, 0, 0), None)
        usage.count(seconds=50.0, waiting=waiting, windows=4)
        training = SimpleNamespace(usage=usage, progress=SimpleNamespace(step=1))
        show_usage(Console(), training)
        return " ".join(capsys.readouterr().out.split())

    assert "--prefetch" not in shown(2.4)
    assert "--prefetch" in shown(2.6) and "smallmind prepare" in shown(2.6)


def test_parts_that_were_frozen_by_hand_have_no_operations():
    whole, frozen = small_training(), small_training()
    frozen.model.freeze("blocks.0")
    for training in (whole, frozen):
        training.train(1, val_every=0, progress=False)
    assert frozen.usage.operations.forward == whole.usage.operations.forward
    assert frozen.usage.operations.backward < whole.usage.operations.backward
