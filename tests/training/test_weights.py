"""A weight per target: how much predicting it counts in training."""

import functools

import numpy as np
import pytest

from smallmind import InputError, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.losses.distillation import Distillation
from smallmind.parallel.group import ALONE
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import RandomWindows, draw
from tests.parallel import in_process
from tests.training.small import TEXT

V, B, T = 11, 4, 8


def model_and_batch(precision="float32", backend="numba", dtype=np.float32, **settings):
    settings = {"seed": 3, "backend": backend, "dtype": dtype, **settings}
    model = TransformerModel(V, T, 16, 2, 2, **settings)
    model.use_precision(precision)
    random = np.random.default_rng(5)
    ids, targets = random.integers(0, V, (2, B, T)).astype(np.int32)
    return model, ids, targets, random.random((B, T)).astype(np.float32)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_weights_of_one_change_no_bit(precision, micro_batch_size):
    results = []
    for weights in (None, np.ones((B, T), np.float32)):
        model, ids, targets, _ = model_and_batch(precision, dropout=0.1)
        model.micro_batch_size = micro_batch_size
        losses = [model.loss_and_gradients(ids, targets, 2.0, weights=weights) for _ in range(20)]
        results.append((losses, model.flat.grad.tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize(("below", "divisor"), [(0.0, None), (0.0, 3.5), (0.6, 3.5)])
def test_the_weighted_mean_and_its_gradient_are_those_of_the_losses(below, divisor):
    model, ids, targets, weights = model_and_batch(backend="numpy", dtype=np.float64)
    weights -= np.float32(below)  # some of them are below zero, others above
    loss, total = functools.partial(model.losses, ids, targets), divisor or weights.sum()
    expected = (weights * loss()).sum() / total
    found = model.loss_and_gradients(ids, targets, weights=weights, divisor=divisor)
    assert found == pytest.approx(expected)
    gradient, flat = model.flat.grad.copy(), model.flat.data
    for place in np.random.default_rng(0).integers(0, flat.size, 40):
        kept, sides = flat[place], []
        for step in (1e-6, -1e-6):
            flat[place] = kept + step
            sides.append((weights * loss()).sum() / total)
        flat[place] = kept
        assert gradient[place] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_weights_of_the_other_sign_give_the_opposite_loss_and_gradient(precision, micro_batch_size):
    model, ids, targets, weights = model_and_batch(precision)
    model.micro_batch_size = micro_batch_size
    results = []
    for sign in (1, -1):
        given = {"weights": sign * np.round(weights), "divisor": targets.size}
        losses = [model.loss_and_gradients(ids, targets, **given) for _ in range(20)]
        results.append((sign * np.array(losses), sign * model.flat.grad))
        model.zero_gradients()
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_below_zero_need_a_divisor():
    model, ids, targets, weights = model_and_batch()
    with pytest.raises(InputError, match="weights below zero need a divisor"):
        model.loss_and_gradients(ids, targets, weights=weights - 1)


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_targets_without_weight_do_not_count(micro_batch_size):
    model, ids, targets, weights = model_and_batch()
    model.micro_batch_size = micro_batch_size
    weights = np.round(weights)
    loss = model.loss_and_gradients(ids, targets, weights=weights)
    gradient = model.flat.grad.copy()
    model.zero_gradients()
    others = np.where(weights == 0, (targets + 1) % V, targets).astype(np.int32)
    assert model.loss_and_gradients(ids, others, weights=weights) == loss
    np.testing.assert_array_equal(model.flat.grad, gradient)
    model.zero_gradients()
    assert model.loss_and_gradients(ids, targets, weights=np.zeros_like(weights)) == 0.0
    assert not model.flat.grad.any()


def test_passes_with_weights_are_recorded_and_read_other_weights():
    """Twice the same model: one whose passes are repeated by machine code, one through layers."""
    model, ids, targets, weights = model_and_batch()
    plain, *_ = model_and_batch()
    plain.workspace.new_recording = None
    for number in range(40):
        given = np.roll(weights, number, axis=1)
        results = []
        for each in (model, plain):
            each.zero_gradients()
            loss = each.loss_and_gradients(ids, targets, weights=given, divisor=7.0)
            results.append((loss, each.flat.grad.tobytes()))
        assert results[0] == results[1], number
    assert model._recorded._recorded


@pytest.mark.parametrize(
    "wrong", [np.ones((B, T + 1)), -np.ones((B, T)), np.full((B, T), np.nan), [[1.0]]]
)
def test_wrong_weights_are_refused(wrong):
    model, ids, targets, _ = model_and_batch()
    with pytest.raises((InputError, TypeError)):
        model.loss_and_gradients(ids, targets, weights=wrong)
    assert not model.flat.grad.any() and model.passes == 0


def training_with(weights, batch_size=6, teacher=False, group=ALONE, **settings):
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 16, 16, 2, 2, seed=3, **settings)
    data = Dataset.from_text(TEXT, tokenizer, 16, batch_size, seed=2)
    data.weights = weights
    distillation = None
    if teacher:
        wise = TransformerModel(tokenizer.vocab_size, 16, 16, 1, 2, seed=4)
        distillation = Distillation(wise, learn_temperature=True)
    return Training(model, tokenizer, data=data, distillation=distillation, group=group)


def some_weights(kind):
    count = len(training_with(None).data.train)
    random = np.random.default_rng(1)
    if kind == "masks":
        return (random.random(count) < 0.4).astype(np.float32)
    return np.full(count, float(kind), np.float32)


def trained(weights, batch_size=6, teacher=False, dropout=0.0, **settings):
    training = training_with(weights, batch_size, teacher, dropout=dropout)
    config = TrainingConfig(
        **{"steps": 14, "warmup_steps": 2, "val_every": 0, "log_every": 1, **settings}
    )
    losses = [record.loss for record in training.steps(config) if hasattr(record, "loss")]
    return losses, training.model.flat.data.copy()


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_equal_weights_train_as_none(precision):
    """Powers of two round nothing."""
    losses, weights = trained(None, precision=precision)
    for factor in (1,) if precision == "float16" else (1, 4, 0.5):  # float16 may underflow
        again, same = trained(some_weights(factor), precision=precision)
        assert again == losses
        np.testing.assert_array_equal(same, weights)


@pytest.mark.parametrize("teacher", [False, True])
def test_micro_batches_and_accumulation_divide_by_the_weight_of_the_update(teacher):
    losses, weights = trained(some_weights("masks"), batch_size=6, teacher=teacher)
    for micro in (1, 4):
        again, same = trained(some_weights("masks"), teacher=teacher, micro_batch_size=micro)
        assert again == pytest.approx(losses, rel=1e-6)
        np.testing.assert_allclose(same, weights, rtol=0, atol=3e-5)


def test_an_update_of_several_batches_has_the_weight_of_all():
    weights = some_weights("masks")
    training = training_with(weights, batch_size=3)
    one = training_with(weights, batch_size=3)
    config = TrainingConfig(
        steps=1, grad_accum_steps=2, val_every=0, log_every=1, max_grad_norm=0.0, max_rollbacks=0
    )
    (record, *_) = training.steps(config)
    total = weight = 0.0
    for number in range(2):
        batch = draw(RandomWindows(one.data, 2), number)
        total += float((one.model.losses(batch.ids, batch.targets) * batch.weights).sum())
        weight += float(batch.weights.sum())
    assert record.loss == pytest.approx(total / weight, rel=1e-6)


def test_no_weight_at_all_leaves_the_weights():
    before = training_with(None).model.flat.data.copy()
    losses, after = trained(some_weights(0), weight_decay=0.0)
    assert losses == [0.0] * 14
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_weighted_runs_have_the_same_bits_on_any_number_of_ranks(size):
    config = TrainingConfig(
        steps=12,
        warmup_steps=2,
        val_every=0,
        log_every=1,
        optimizer="muon",
        data_shards=5,
        grad_accum_steps=2,
        prefetch=1,
    )

    def training_on(ranks):
        return training_with(some_weights("masks"), teacher=True, dropout=0.1, group=ranks)

    def steps(training):
        losses = [record.loss for record in training.steps(config) if hasattr(record, "loss")]
        return losses, training.model.flat.data.tobytes()

    def trained(ranks):
        return steps(training_on(ranks))

    assert in_process.on_ranks(size, trained, trained) == steps(training_on(ALONE))
