"""Adapters: matrices of low rank beside frozen ones, which alone are trained."""

import numpy as np
import pytest

from smallmind import AdamW, InputError, TransformerModel, gradient_check
from smallmind.kernels import compiled, reference
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to, to_float32
from smallmind.nn.lora import low_rank_product
from smallmind.nn.recompute import RecomputePlan
from smallmind.settings.config import Adapter, ModelConfig, TrainingConfig
from smallmind.settings.presets import ARCHITECTURES
from tests.architectures import BROUGHT

LLAMA = {**ARCHITECTURES["llama"], "n_kv_head": 2, "qk_norm": True}
BIASED = {**LLAMA, "bias": True, "tie_weights": True}
MODERN = {**ARCHITECTURES["modern"], "x0_scalars": True, "logit_softcap": 15.0}
UNTIED = {"tie_weights": False, "dropout": 0.2}
SETTINGS = [{}, LLAMA, BIASED, MODERN, UNTIED, {"mlp": "relu2", "bias": False}]
SETTINGS += BROUGHT.values()
EVERYWHERE = Adapter(3, 5.0, on=("attention", "mlp", "head"))
ADAPTER = Adapter(2, 4.0)


def new_model(adapter=ADAPTER, backend="numpy", **settings):
    return TransformerModel(13, 8, 12, 3, 4, backend=backend, adapter=adapter, **settings)


def batch(B=3, T=8):
    tokens = np.random.default_rng(1).integers(0, 13, (B, T + 1))
    return tokens[:, :-1], tokens[:, 1:]


def moved(model):
    """The model with other values everywhere: B is no longer zero."""
    random = np.random.default_rng(0)
    noise = {name: random.standard_normal(shape) for name, shape in model.flat.shapes.items()}
    model.flat.write({name: np.float32(0.2 * value) for name, value in noise.items()})
    return model


@pytest.mark.parametrize(
    ("settings", "adapter"),
    [
        *((settings, EVERYWHERE) for settings in SETTINGS),
        *(({}, adapter) for adapter in (ADAPTER, Adapter(1, 1.0, 0.3))),
        *((MODERN, adapter) for adapter in (ADAPTER, Adapter(1, 1.0, 0.3))),
    ],
    ids=str,
)
def test_gradients_are_right(settings, adapter):
    if "head" in adapter.on and settings.get("tie_weights", True):
        adapter = adapter._replace(on=("attention", "mlp"))
    model = moved(new_model(adapter, **settings))
    found = gradient_check(model)
    assert found.ok, found
    trained = [name for name in model.parameters if "lora" in name]
    assert list(found.errors) == list(model.gradients) == trained
    assert ("head.lora_a" in trained) == ("head" in adapter.on)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("backend", "precision"), [("numpy", "float32"), ("numba", "float32"), ("numba", "bfloat16")]
)
def test_the_first_loss_is_that_of_the_base_to_the_bit(settings, backend, precision):
    losses = []
    for adapter in None, ADAPTER:
        model = new_model(None, backend, **settings)
        moved(model)
        if adapter:
            adapted = new_model(adapter, backend, **settings)
            adapted.flat.write(model.parameters)
            model = adapted
        model.use_precision(precision)
        losses.append(model.losses(*batch()))
    np.testing.assert_array_equal(*losses)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_compiled_gradients_are_those_of_numpy(settings, dropout, precision):
    adapter = Adapter(3, 5.0, dropout)
    expected = moved(new_model(adapter, **settings))
    model = moved(new_model(adapter, "numba", **settings))
    model.use_precision(precision)
    losses = [each.loss_and_gradients(*batch()) for each in (expected, model)]
    tolerance = 2e-5 if precision == "float32" else 0.1
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    for name, gradient in expected.gradients.items():
        error = np.linalg.norm(model.gradients[name] - gradient)
        assert error <= tolerance * np.linalg.norm(gradient), name


@pytest.mark.parametrize("widths", [(1,), (33,), (16, 3, 3), (40, 1), (7, 20, 20), (64, 32, 32)])
@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, FLOAT16])
def test_columns_are_spread_and_gathered(widths, r, dtype):
    random = np.random.default_rng(sum(widths))
    starts, shape = np.cumsum([0, *widths]).astype(np.int32), (r * len(widths), sum(widths))
    x = random.standard_normal((r, sum(widths))).astype(np.float32)
    dout = random.standard_normal(shape).astype(np.float32)
    spread, gathered = np.full(shape, np.nan, np.float32), random.standard_normal(x.shape)
    expected = spread.copy(), gathered.astype(np.float32)
    found = round_to(spread, dtype), gathered.astype(np.float32)
    reference.spread_columns(expected[0], to_float32(round_to(x, dtype)), starts, 1.7)
    compiled.spread_columns(found[0], round_to(x, dtype), starts, 1.7)
    np.testing.assert_allclose(
        to_float32(found[0]), to_float32(round_to(expected[0], dtype)), rtol=0.01
    )
    assert np.isfinite(expected[0]).all() and (expected[0] == 0).any() == (len(widths) > 1)
    reference.gather_columns(expected[1], dout, starts, 1.7)
    compiled.gather_columns(found[1], dout, starts, 1.7)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_recompute_and_micro_batches_change_nothing(settings, backend):
    gradients = []
    for plan in RecomputePlan(enabled=False), RecomputePlan(1), RecomputePlan(2):
        model = moved(new_model(Adapter(3, 5.0, 0.3), backend, **settings))
        model.use_recompute(plan)
        for _ in range(3):  # recorded passes too
            model.zero_gradients()
            model.passes = 0
            model.loss_and_gradients(*batch())
        gradients.append(model.flat.grad.copy())
    np.testing.assert_array_equal(gradients[1], gradients[0])
    np.testing.assert_array_equal(gradients[2], gradients[0])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_merged_model_computes_the_same(settings):
    model = moved(new_model(**settings))
    merged = new_model(None, **settings)
    parameters = dict(model.parameters)
    for spec in merged.flat.specs:
        value = np.array(parameters[spec.name])
        layer = spec.name.removesuffix("weight")
        if layer + "lora_a" in parameters:
            widths = spec.widths if not model.config.fuses_matrices else ()
            a, b = parameters[layer + "lora_a"], parameters[layer + "lora_b"]
            value += low_rank_product(a, b, widths or (value.shape[1],), ADAPTER.scale)
        merged.flat.write({spec.name: value})
    ids = batch()[0]
    np.testing.assert_allclose(model.forward(ids), merged.forward(ids), atol=1e-4)


def test_only_the_adapter_changes():
    model = moved(new_model(backend="numba", **LLAMA))
    before = {name: np.array(value) for name, value in model.parameters.items()}
    optimizer = AdamW(model, 0.01)
    for _ in range(3):
        model.loss_and_gradients(*batch())
        optimizer.step()
    changed = {name for name, value in model.parameters.items() if (value != before[name]).any()}
    assert changed == {name for name in before if "lora" in name}
    assert model.flat.data.size < sum(value.size for value in before.values()) / 2


def test_matrices_have_an_adapter_each_where_other_programs_keep_them_apart():
    model = new_model(Adapter(2, 4.0), **LLAMA)
    assert model.parameters["blocks.0.attention.qkv.lora_a"].shape == (12, 6)
    assert model.parameters["blocks.0.mlp.expansion.lora_a"].shape == (12, 4)
    assert new_model(ADAPTER).parameters["blocks.0.attention.qkv.lora_a"].shape == (12, 2)


def test_parts_without_an_adapter_have_none():
    model = new_model(Adapter(2, 4.0, on=("mlp",)))
    assert not any("attention" in name for name in model.gradients)
    with pytest.raises(InputError, match="shares the embedding's matrix"):
        new_model(Adapter(2, 4.0, on=("head",)))


def test_frozen_blocks_keep_their_adapter():
    model = TransformerModel(13, 8, 12, 3, 4, adapter=ADAPTER, freeze="blocks.0-1")
    assert {name.split(".")[1] for name in model.gradients} == {"2"}
    assert model.network.lowest == 2
    assert gradient_check(moved(model)).ok


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 2.0},
        {"lora_rank": 4, "lora_on": "attention,feet"},
        {"lora_rank": 4, "optimizer": "muon"},
        {"lora_rank": -1},
        {"lora_rank": 4, "lora_dropout": 1.0},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(fields):
    with pytest.raises(InputError, match=next(reversed(fields))):
        TrainingConfig(**fields)


def test_the_settings_describe_an_adapter():
    assert TrainingConfig().adapter is None
    assert TrainingConfig(lora_rank=8).adapter == Adapter(8, 16.0)
    config = TrainingConfig(lora_rank=8, lora_alpha=4, lora_on="head, attention")
    assert config.adapter == Adapter(8, 4.0, 0.0, ("attention", "head"))


def test_gpt2_keeps_its_matrices_together():
    assert ModelConfig().fuses_matrices
    assert not ModelConfig(**LLAMA).fuses_matrices
