"""Models that store weights and activations in 16 bits."""

import dataclasses

import numpy as np
import pytest

from smallmind import InputError, Precision, TransformerModel
from smallmind.files import safetensors
from smallmind.kernels.codegen import isa
from smallmind.kernels.codegen.isa import ISA
from smallmind.nn.backend import faster_precision
from tests.peaks import rented_at_the_peak

SIXTEEN_BIT = [Precision.FLOAT16, Precision.BFLOAT16]
SCALE = {Precision.FLOAT16: 65536.0, Precision.BFLOAT16: 1.0}
# Relative error of a small model's gradient: some dozens of roundings, each of half a unit.
ERROR = {Precision.FLOAT16: 3e-3, Precision.BFLOAT16: 3e-2}


def small_model(precision=Precision.FLOAT32, **settings):
    model = TransformerModel(11, 16, 48, 3, 3, **settings)
    model.use_precision(precision)
    return model


def batch(seed=0):
    data = np.random.default_rng(seed).integers(0, 11, (4, 17)).astype(np.int32)
    return data[:, :-1], data[:, 1:]


def gradients(model, scale=1.0):
    model.zero_gradients()
    model.passes = 3
    loss = model.loss_and_gradients(*batch(), scale)
    return loss, model.flat.grad / np.float32(scale)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("precision", SIXTEEN_BIT)
def test_gradients_match_float32_up_to_rounding(precision, tie_weights, dropout):
    settings = {"tie_weights": tie_weights, "dropout": dropout}
    loss, exact = gradients(small_model(**settings))
    half_loss, half = gradients(small_model(precision, **settings), SCALE[precision])
    assert half_loss == pytest.approx(loss, rel=1e-3)
    error = np.linalg.norm(half - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < ERROR[precision]  # above 0: it was not computed in float32


@pytest.mark.parametrize("precision", SIXTEEN_BIT)
def test_weights_written_by_hand_take_effect_after_refresh(precision):
    model = small_model(precision)
    ids, targets = batch()
    before = model.loss(ids, targets)
    model.parameters["token_embedding.weight"][...] = 0
    assert model.loss(ids, targets) == before
    model.flat.refresh()
    assert model.loss(ids, targets) != before


def test_saved_weights_are_float32(tmp_path):
    model = small_model(Precision.FLOAT16)
    model.save(tmp_path / "model.safetensors")
    tensors, _ = safetensors.read(tmp_path / "model.safetensors")
    for name, value in tensors.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, model.parameters[name])


def test_switching_back_to_float32_restores_exact_results():
    model = small_model()
    expected = gradients(model)
    model.use_precision(Precision.FLOAT16)
    model.use_precision(Precision.FLOAT32)
    loss, actual = gradients(model)
    assert loss == expected[0] and not model.flat.copies
    np.testing.assert_array_equal(actual, expected[1])


def test_auto_chooses_what_the_cpu_supports():
    model = small_model()
    expected = Precision.BFLOAT16 if ISA.fast_bfloat16 else Precision.FLOAT32
    assert model.use_precision(Precision.AUTO) == model.precision == expected


@pytest.mark.parametrize(
    ("facts", "float16", "bfloat16"),
    [
        ({"fast_bfloat16": True, "quads": False}, "bfloat16", None),
        ({"fast_bfloat16": False, "quads": False}, "float32", "float32"),
        ({"fast_bfloat16": False, "quads": True}, "float32", None),  # not known
    ],
)
def test_it_is_known_in_which_precision_steps_are_faster(monkeypatch, facts, float16, bfloat16):
    monkeypatch.setattr(isa, "ISA", dataclasses.replace(ISA, **facts))
    found = {kind: faster_precision(kind, "numba") for kind in (*SIXTEEN_BIT, Precision.FLOAT32)}
    assert found == {"float16": float16, "bfloat16": bfloat16, "float32": None}


def test_the_numpy_backend_refuses_16_bits():
    model = TransformerModel(11, 16, 48, 3, 3, backend="numpy")
    assert model.use_precision(Precision.AUTO) == Precision.FLOAT32
    with pytest.raises(InputError, match="precision='float16' needs backend='numba'"):
        model.use_precision(Precision.FLOAT16)


def bytes_at_the_peak(precision, monkeypatch):
    """The peak of what a training pass rents."""
    model = TransformerModel(11, 64, 128, 4, 2)
    model.use_precision(precision)
    ids = np.zeros((8, 64), np.int32)
    return rented_at_the_peak(monkeypatch, model, lambda model: model.loss_and_gradients(ids, ids))


@pytest.mark.parametrize("precision", SIXTEEN_BIT)
def test_activations_take_half_the_memory(precision, monkeypatch):
    exact = bytes_at_the_peak(Precision.FLOAT32, monkeypatch)
    assert bytes_at_the_peak(precision, monkeypatch) <= 0.52 * exact
    model = small_model(precision)
    assert model.flat.copied_bytes == model.flat.data.nbytes / 2
