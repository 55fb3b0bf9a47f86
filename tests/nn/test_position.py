"""A position encoding of one's own is one class and one line: nothing compares their names."""

import re
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import AdamW, ModelConfig, TrainingConfig, TransformerModel, gradient_check, parts
from smallmind.forecast.memory import estimate
from smallmind.nn.cache import KeyValueCache
from smallmind.nn.embedding import Embedding
from smallmind.nn.position import Position, position_class
from tests.training.test_memory_estimate import SmallRun

V, T = 11, 12
IDS = np.random.default_rng(0).integers(0, V, (3, T)).astype(np.int32)


class Sinusoidal(Position):
    """Adds sines and cosines of the position (Vaswani et al. 2017)."""

    def embed(self, kernels, x, ids, token):
        super().embed(kernels, x, ids, token)
        (B, T), C = ids.shape, x.shape[1]
        positions = self.workspace.starts[:, None] + np.arange(T)
        angles = positions[..., None] * 100.0 ** (-np.arange(C // 2) / (C // 2))
        x.reshape(B, T, C)[...] += np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


class Fading(Position):
    """Queries and keys shrink from position to position."""

    rotates = True

    def rotate(self, kernels, x):
        T = self.workspace.T
        positions = self.workspace.starts[:, None] + np.arange(T)
        sizes = np.broadcast_to(0.9**positions, (len(x) // T, T)).reshape(-1, 1)
        x[:, :16] *= sizes.astype(x.dtype)

    def rotate_backward(self, kernels, dx):
        # forward: x = sizes x
        self.rotate(kernels, dx)


@pytest.fixture(autouse=True)
def own_positions(monkeypatch):
    monkeypatch.setitem(parts.POSITIONS, "sinusoidal", f"{__name__}:Sinusoidal")
    monkeypatch.setitem(parts.POSITIONS, "fading", f"{__name__}:Fading")


OWN = pytest.mark.parametrize("position", ["sinusoidal", "fading"])
NORMED = pytest.mark.parametrize("qk_norm", [True, False])


def config(position, **changes):
    fields = {"n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 8, **changes}
    return ModelConfig(vocab_size=V, block_size=T, position=position, **fields)


def move(model):
    """Moves the weights away from their small initial values."""
    model.flat.data += np.random.default_rng(2).normal(0, 0.2, model.flat.data.size)


@OWN
@NORMED
def test_the_gradients_are_right_and_it_learns(position, qk_norm):
    exact = TransformerModel(config(position, qk_norm=qk_norm), backend="numpy", dtype=np.float64)
    move(exact)
    assert (found := gradient_check(exact)).ok, found
    model = TransformerModel(config(position, qk_norm=qk_norm))
    optimizer, losses = AdamW(model, learning_rate=1e-2), []
    for _ in range(40):
        losses.append(model.loss_and_gradients(IDS[:, :-1], IDS[:, 1:]))
        optimizer.step(max_grad_norm=1.0)
    assert losses[-1] < losses[0] - 0.5


def test_its_layer_is_checked_alone():
    assert gradient_check(Embedding, IDS, config=config("sinusoidal")).ok


@OWN
def test_it_tells_orders_apart_and_decodes_past_its_context(position):
    model = TransformerModel(config(position, qk_norm=True))
    move(model)
    ids = np.random.default_rng(1).integers(0, V, (2, 3 * T))
    assert (model.forward(ids[:, [0, 1, 2]]) != model.forward(ids[:, [1, 0, 2]]))[:, -1].any()
    cache, begin = KeyValueCache(model, 2), 0
    for count in (5, 1, 1, 4, *[1] * (3 * T - 11)):
        logits = model.decode(ids[:, begin : begin + count], cache)
        begin += count
        if begin <= T:
            whole = model.forward(ids[:, :begin])[:, -1]
            np.testing.assert_allclose(logits, whole, rtol=0, atol=1e-5)
    assert cache.start == 3 * T and np.isfinite(logits).all()


@OWN
def test_the_estimate_of_its_memory_is_exact(position):
    model, training = config(position), TrainingConfig(steps=2, val_batches=1)
    run = SmallRun(model, training, 4, 300)
    expected = estimate(model, training, 4)
    assert expected.activations == run.held_by_pool and expected.weights == run.weights


def test_the_package_s_own_say_what_others_ask():
    facts = {
        name: (found.limits_context, found.rotates)
        for name in ("learned", "rope", "none")
        if (found := position_class(config(name)))
    }
    assert facts == {"learned": (True, False), "rope": (False, True), "none": (False, False)}


def test_nothing_compares_the_names_of_positions():
    compared = re.compile(r"\bposition\"?\]?\s*(?:==|!=|\bin\b)")
    for source in Path(smallmind.__file__).parent.rglob("*.py"):
        if source.parent.name != "lessons":
            assert not compared.search(source.read_text(encoding="utf-8")), source
