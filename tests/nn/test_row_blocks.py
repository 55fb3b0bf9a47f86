"""Large vocabularies: logits are never whole, and gradients touch only rows that occur."""

import numpy as np
import pytest

from smallmind import TransformerModel, gradient_check
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn import head
from smallmind.nn.workspace import Pass, Workspace
from smallmind.settings.presets import ARCHITECTURES

T, V = 12, 31
VARIANTS = {
    "tied": ARCHITECTURES["gpt2"],
    "untied": {**ARCHITECTURES["llama"], "tie_weights": False},
    "capped": {**ARCHITECTURES["modern"], "logit_softcap": 5.0},
}


def new_model(variant="tied", **changes):
    model = TransformerModel(V, T, 24, 2, 4, **{"seed": 1, **VARIANTS[variant], **changes})
    model.workspace.pool = TensorPool()
    random = np.random.default_rng(1)
    for values in model.parameters.values():
        values[...] += random.normal(0, 0.1, values.shape)
    return model


def batch(rows=5):
    windows = np.random.default_rng(3).integers(0, V, (rows, T + 1), np.int32)
    return windows[:, :-1], windows[:, 1:]


def learned(model, weights=None):
    """The loss and the gradients of a pass."""
    model.zero_gradients()
    loss = model.loss_and_gradients(*batch(), at=Pass(0), weights=weights)
    return loss, model.flat.grad.copy()


def by_blocks(monkeypatch, logits):
    monkeypatch.setattr(head, "MAX_LOGITS", logits)


@pytest.fixture
def rents(monkeypatch):
    """The shapes that workspaces rent, from now on."""
    shapes, rent = [], Workspace._rent

    def noted(self, shape, dtype):
        shapes.append(shape)
        return rent(self, shape, dtype)

    monkeypatch.setattr(Workspace, "_rent", noted)
    return shapes


WEIGHTS = {"all": None, "some": 0.5, "few": 0.9}


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("most", [7 * V, 17 * V, 40 * V, V - 1])
def test_blocks_give_the_loss_and_gradients_of_the_whole(
    monkeypatch, rents, variant, weights, backend, most
):
    model, share = new_model(variant, backend=backend), WEIGHTS[weights]
    if share is not None:
        share = (np.random.default_rng(2).random(batch()[0].shape) > share).astype(np.float32)
    loss, gradients = learned(model, share)
    by_blocks(monkeypatch, most)
    rents.clear()
    found, others = learned(model, share)
    logits = [shape for shape in rents if shape[-1] == V]
    assert len(logits) > 1 or share is not None
    assert all(rows * V <= max(most, V) for rows, _ in logits)
    assert found == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(others, gradients, rtol=1e-5, atol=1e-6 * np.abs(gradients).max())


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_blocks_in_16_bits(monkeypatch, precision):
    model = new_model()
    model.use_precision(precision)
    loss, gradients = learned(model)
    by_blocks(monkeypatch, 17 * V)
    found, others = learned(model)
    assert found == pytest.approx(loss, rel=1e-6)  # logits and losses are not rounded
    np.testing.assert_allclose(others, gradients, rtol=0, atol=0.02 * np.abs(gradients).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_their_gradients_are_right(monkeypatch, variant):
    by_blocks(monkeypatch, 17 * V)
    model = new_model(variant, backend="numpy", dtype=np.float64)
    found = gradient_check(model, *batch())
    assert found, found


@pytest.mark.parametrize("frozen", ["embedding,blocks.0-1,final_norm", "head", "embedding"])
def test_frozen_parts(monkeypatch, frozen):
    model = new_model("untied")
    model.freeze(frozen)
    loss, gradients = learned(model)
    by_blocks(monkeypatch, 17 * V)
    found, others = learned(model)
    assert found == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(others, gradients, rtol=1e-5, atol=1e-6 * np.abs(gradients).max())


def test_logits_that_fit_keep_their_bits(monkeypatch):
    model = new_model()
    loss, gradients = learned(model)
    by_blocks(monkeypatch, 5 * T * V)
    found, others = learned(model)
    assert found == loss and (others == gradients).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_by_blocks_has_the_losses_of_the_whole(monkeypatch, rents, variant):
    model = new_model(variant)
    correct, found = np.zeros((2, 5, T), bool)
    losses = model.losses(*batch(), correct)
    by_blocks(monkeypatch, 17 * V)
    rents.clear()
    # Rows do not depend on each other, but blocked products may add in another order.
    np.testing.assert_allclose(model.losses(*batch(), found), losses, rtol=1e-6)
    assert (correct == found).all()
    assert max(shape[0] for shape in rents if shape[-1] == V) <= 17


def test_a_pool_holds_one_block_of_logits(monkeypatch):
    held = []
    for most in (5 * T * V, 17 * V):
        by_blocks(monkeypatch, most)
        model = new_model()
        learned(model)
        held.append(model.workspace.pool.statistics().bytes_held)
    kept = 5 * T * 24  # the gradient of the head's input, and a block of it
    assert held[1] < held[0] - 4 * (5 * T * V - 17 * V) + 4 * 2 * kept


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_the_gradient_of_the_embedding_touches_only_rows_that_occur(backend):
    model = new_model("untied", backend=backend)
    gradient = model.gradients["token_embedding.weight"]
    ids, targets = np.full((3, T), 4, np.int32), np.full((3, T), 9, np.int32)
    ids[0, :5], ids[2, 7] = 6, V - 1
    gradient[...] = np.nan
    gradient[[4, 6, V - 1]] = 0
    model.loss_and_gradients(ids, targets)
    touched = np.flatnonzero(~np.isnan(gradient).all(axis=1))
    np.testing.assert_array_equal(touched, [4, 6, V - 1])
    assert np.isfinite(gradient[touched]).all()


def test_recorded_passes_repeat_the_blocks(monkeypatch):
    by_blocks(monkeypatch, 17 * V)
    model, plain = new_model(), new_model()
    plain.workspace.new_recording = None
    for _ in range(15):
        assert learned(model)[0] == learned(plain)[0]
        assert (model.flat.grad == plain.flat.grad).all()
