"""AdamW and Muon: the norm that they return, clipping, unscaling, 16 bits, and refusals."""

import math

import numpy as np
import pytest

from smallmind import AdamW, InputError, Muon, TransformerModel
from smallmind.kernels.number_types import round_to, to_float32
from smallmind.nn.parameters import Role
from tests.optim.small import small_model, with_gradients

KINDS = pytest.mark.parametrize("kind", [AdamW, Muon])


def test_adamw_decays_only_matrices():
    model = TransformerModel(5, 4, 8, 1, 2)
    for value in model.parameters.values():
        value[...] = 1
    norm = AdamW(model, learning_rate=0.1, weight_decay=0.5).step()
    assert norm == 0  # all gradients are zero: only decay
    for name, value in model.parameters.items():
        expected = 0.95 if value.ndim == 2 else 1.0
        np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=name)
    assert model.parameters["token_embedding.weight"][0, 0] == np.float32(0.95)


def test_adamw_returns_the_norm_and_clips_to_it():
    updates = []
    for scale in (1.0, 1000.0):
        model = with_gradients(small_model())
        before = model.flat.data.copy()
        model.flat.grad *= np.float32(scale)
        expected = np.linalg.norm(model.flat.grad)
        optimizer = AdamW(model, weight_decay=0.0, eps=1.0)
        assert optimizer.step(max_grad_norm=1.0) == pytest.approx(expected, rel=1e-6)
        assert np.linalg.norm(optimizer.m) == pytest.approx(0.1, rel=1e-4)
        updates.append(model.flat.data - before)
    # Clipped to the same norm, both steps are equal.
    np.testing.assert_allclose(updates[0], updates[1], rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize("backend", ["numba", "numpy"])
@KINDS
def test_gradients_are_unscaled_then_clipped_to_a_norm_and_then_by_value(kind, backend, loss_scale):
    model = with_gradients(small_model(backend=backend))
    gradients = model.flat.grad.copy()
    norm = np.linalg.norm(gradients)
    model.flat.grad *= np.float32(loss_scale)
    optimizer = AdamW(model, betas=(0.0, 0.99)) if kind is AdamW else Muon(model, momentum=0.0)
    assert optimizer.step(2.0, loss_scale, 0.01) == pytest.approx(norm, rel=1e-6)
    assert not model.flat.grad.any()
    expected = np.clip(gradients * (2.0 / norm), -0.01, 0.01)
    assert 0.1 < (np.abs(expected) == 0.01).mean() < 0.99
    if kind is AdamW:
        np.testing.assert_allclose(optimizer.m, expected, rtol=1e-5)
    else:
        (matrices,) = model.flat.ranges(Role.MATRIX)
        np.testing.assert_allclose(optimizer.matrix_mean, expected[matrices], rtol=1e-5)


@pytest.mark.parametrize("planted", [np.nan, np.inf])
@KINDS
def test_a_gradient_that_is_not_finite_changes_nothing(kind, planted):
    model = with_gradients(small_model())
    optimizer = kind(model)
    model.gradients["blocks.1.mlp.expansion.weight"][3, 4] = planted
    before, gradients = model.flat.data.copy(), model.flat.grad.copy()
    assert not math.isfinite(optimizer.step(max_grad_norm=1.0))
    np.testing.assert_array_equal(model.flat.grad, gradients)
    np.testing.assert_array_equal(model.flat.data, before)
    assert optimizer.steps == 0 and not any(x.any() for x in optimizer.tensors().values())


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@KINDS
def test_the_working_copy_is_kept_up_to_date(kind, precision):
    model = small_model()
    model.use_precision(precision)
    optimizer = kind(model, 1e-2)
    for seed in range(3):
        with_gradients(model, seed)
        optimizer.step(1.0, 256.0)
    working = model.flat.copies[0].values
    np.testing.assert_array_equal(working, round_to(model.flat.data, working.dtype))
    assert (to_float32(working) != model.flat.data).any()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AdamW, {"learning_rate": -1.0}),
        (AdamW, {"betas": (1.0, 0.9)}),
        (AdamW, {"weight_decay": -0.1}),
        (AdamW, {"eps": -1.0}),
        (Muon, {"learning_rate": 0.0}),
        (Muon, {"matrix_learning_rate": -1.0}),
        (Muon, {"momentum": 1.0}),
        (Muon, {"momentum_warmup_steps": -1}),
        (Muon, {"weight_decay": math.nan}),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(kind, settings):
    name = next(iter(settings))
    with pytest.raises(InputError, match="beta1=" if name == "betas" else f"{name}="):
        kind(small_model(), **settings)


@pytest.mark.parametrize("limit", ["max_grad_norm", "max_grad_value"])
@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan])
def test_clipping_to_zero_is_refused(limit, value):
    with pytest.raises(InputError, match=f"{limit}={value} must be above 0, or None"):
        AdamW(small_model()).step(**{limit: value})
