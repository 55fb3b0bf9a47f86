"""Frozen parts keep their weights, and cost neither gradients nor a backward pass."""

import numpy as np
import pytest

from smallmind import AdamW, InputError, ModelConfig, TransformerModel, gradient_check
from smallmind.kernels.number_types import BFLOAT16, round_to, to_float32
from smallmind.nn import layers
from smallmind.nn.freezing import frozen_parts
from smallmind.nn.linear import Linear
from smallmind.nn.parameters import Role
from smallmind.nn.recompute import RecomputePlan
from smallmind.optim.muon import Muon
from smallmind.settings.presets import ARCHITECTURES
from tests.peaks import rented_at_the_peak

LLAMA = {**ARCHITECTURES["llama"], "n_kv_head": 2, "qk_norm": True}
MODERN = {**ARCHITECTURES["modern"], "x0_scalars": True, "logit_softcap": 15.0}
UNTIED = {"tie_weights": False, "dropout": 0.2}
BELOW = "embedding,blocks.0-1"


def new_model(freeze=None, backend="numpy", **settings):
    return TransformerModel(13, 8, 12, 4, 4, backend=backend, freeze=freeze, **settings)


def batch(B=3, T=8):
    tokens = np.random.default_rng(1).integers(0, 13, (B, T + 1))
    return tokens[:, :-1], tokens[:, 1:]


def with_gradients(model, precision="float32"):
    model.use_precision(precision)
    random = np.random.default_rng(0)
    noise = {name: random.standard_normal(shape) for name, shape in model.flat.shapes.items()}
    model.flat.write({name: np.float32(0.1 * value) for name, value in noise.items()})
    model.loss_and_gradients(*batch())
    return model


@pytest.mark.parametrize("freeze", [BELOW, "blocks.2", "embedding,blocks.0-3", "blocks.1,blocks.3"])
@pytest.mark.parametrize("settings", [{}, LLAMA, MODERN, UNTIED], ids=str)
@pytest.mark.parametrize(
    ("backend", "precision"), [("numpy", "float32"), ("numba", "float32"), ("numba", "bfloat16")]
)
def test_other_gradients_have_the_same_bits(freeze, settings, backend, precision):
    whole = with_gradients(new_model(None, backend, **settings), precision)
    for plan in RecomputePlan(enabled=False), RecomputePlan(2):
        model = new_model(freeze, backend, **settings)
        model.use_recompute(plan)
        with_gradients(model, precision)
        frozen = {f"{part}." for part in frozen_parts(freeze, model.config) - {"embedding"}}
        frozen |= {"token_", "position_", "bigram_"} if "embedding" in freeze else set()
        trained = [name for name in whole.gradients if not name.startswith(tuple(frozen))]
        assert list(model.gradients) == trained
        for name in trained:
            np.testing.assert_array_equal(model.gradients[name], whole.gradients[name], name)


@pytest.mark.parametrize("settings", [{}, LLAMA, MODERN, UNTIED], ids=str)
@pytest.mark.parametrize("freeze", [BELOW, "blocks.2"])
def test_gradients_are_right_with_frozen_parts(settings, freeze):
    model = new_model(freeze, **settings)
    found = gradient_check(model)
    assert found.ok, found
    assert set(found.errors) == set(model.gradients) < set(model.parameters)


def calls_of(model):
    """The layer and the kernel of each call in the backward pass."""
    calls = []

    def wrap(name, kernel):
        def counted(*arguments, **named):
            if model.workspace.direction == "backward":
                calls.append((model.workspace.layer, name))
            return kernel(*arguments, **named)

        return counted

    with model.workspace.wrapped_kernels(wrap):
        model.loss_and_gradients(*batch())
    return calls


@pytest.mark.parametrize("settings", [{}, LLAMA, MODERN, UNTIED], ids=str)
@pytest.mark.parametrize("plan", [RecomputePlan(enabled=False), RecomputePlan(1)])
def test_below_what_is_trained_there_is_no_backward_pass(settings, plan):
    def parts_of(freeze):
        model = new_model(freeze, **settings)
        model.use_recompute(plan)
        layers = {layer for layer, _ in calls_of(model)}
        numbers = {layer.split(".")[1] for layer in layers if layer.startswith("blocks.")}
        return numbers, any("embedding" in layer.split(".")[0] for layer in layers)

    assert parts_of(None) == ({"0", "1", "2", "3"}, True)
    assert parts_of("blocks.0-1") == ({"0", "1", "2", "3"}, True)
    carries = bool(settings.get("x0_scalars"))  # the gradient of what later blocks mix in
    assert parts_of(BELOW)[0] == {"2", "3"} and (carries or not parts_of(BELOW)[1])
    assert parts_of("embedding,blocks.0-3")[0] == set()


def test_a_frozen_matrix_between_trained_ones_has_no_product_of_its_own():
    def products(freeze):
        calls = calls_of(new_model(freeze))
        return [layer for layer, name in calls if name in ("matmul_transpose_a", "column_sum")]

    assert any(layer.startswith("blocks.2") for layer in products(None))
    expected = [layer for layer in products(None) if not layer.startswith("blocks.2")]
    assert products("blocks.2") == expected


def test_only_the_head():
    model = new_model("embedding,blocks.0-3,final_norm", **UNTIED)
    assert calls_of(model) == [("head", "matmul_transpose_a")]
    assert list(model.gradients) == ["head.weight"]


@pytest.mark.parametrize(
    ("freeze", "settings", "message"),
    [
        ("blocks.4", {}, "no part 'blocks.4', only embedding, blocks.0-3, final_norm; the head is"),
        ("blocks.2-4", {}, "no part 'blocks.2-4'"),
        ("blocks.2-1", {}, "no part 'blocks.2-1'"),
        ("", {}, "no part ''"),
        ("embedding,", {}, "no part ''"),
        ("head", {}, "no part 'head'.*; the head is the embedding"),
        ("mlp", {"tie_weights": False}, "no part 'mlp', only embedding, .*, final_norm, head$"),
        ("embedding,blocks.0-3,final_norm", {}, "leaves nothing to train"),
    ],
)
def test_parts_that_a_model_does_not_have(freeze, settings, message):
    with pytest.raises(InputError, match=message):
        new_model(freeze, **settings)
    model = new_model(**settings)
    with pytest.raises(InputError, match=message):
        model.freeze(freeze)
    assert model.frozen is None and len(model.gradients) == len(model.parameters)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_what_is_frozen_has_its_weights_and_nothing_else(precision):
    whole, model = new_model(None, "numba"), new_model(BELOW, "numba")
    whole.use_precision(precision)
    model.use_precision(precision)
    itemsize = 4 if precision == "float32" else 2
    count = sum(spec.size for spec in model.flat.specs if not spec.trainable)
    frozen = sum(array.nbytes for array in model.flat.arrays[1:])
    assert frozen == itemsize * count > 0
    assert model.flat.grad.nbytes == model.flat.data.nbytes < whole.flat.data.nbytes
    assert model.flat.copied_bytes == (0 if itemsize == 4 else model.flat.data.nbytes / 2)
    for kind in AdamW, Muon:
        optimizer = kind(model)
        assert sum(x.nbytes for x in optimizer.tensors().values()) <= 2 * model.flat.data.nbytes
    for name, value in model.parameters.items():
        expected = whole.parameters[name]
        if name in model.gradients:
            value[...] = value + 1
        else:
            expected = to_float32(whole.flat.compute[name])
            with pytest.raises(ValueError, match="read-only"):
                value[...] = 0
        np.testing.assert_array_equal(model.parameters[name], expected + (name in model.gradients))


@pytest.mark.parametrize("kind", [AdamW, Muon])
@pytest.mark.parametrize("freeze", [BELOW, "blocks.0-3", "embedding,final_norm,blocks.1"])
def test_optimizers_update_what_is_trained(kind, freeze):
    whole, model = (with_gradients(new_model(each, "numba")) for each in (None, freeze))
    before = {name: value.copy() for name, value in model.parameters.items()}
    for each in (whole, model):
        kind(each, 1e-2).step()
    for name, value in model.parameters.items():
        expected = whole.parameters[name] if name in model.gradients else before[name]
        np.testing.assert_array_equal(value, expected, name)


def test_the_norm_is_that_of_what_is_trained():
    model = with_gradients(new_model(BELOW))
    squares = sum(
        float((value.astype(np.float64) ** 2).sum()) for value in model.gradients.values()
    )
    assert AdamW(model).step(0.1) == pytest.approx(squares**0.5, rel=1e-6)
    assert not model.flat.grad.any()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_freezing_can_be_undone(precision):
    model = with_gradients(new_model(None, "numba"), precision)
    expected, gradients = (
        model.flat.compute["token_embedding.weight"].copy(),
        model.flat.grad.copy(),
    )
    model.freeze(BELOW)
    assert model.frozen == "blocks.0,blocks.1,embedding" and not model.flat.grad.any()
    model.freeze(None)
    assert model.frozen is None
    np.testing.assert_array_equal(model.flat.compute["token_embedding.weight"], expected)
    model.passes = 0
    model.loss_and_gradients(*batch())
    np.testing.assert_array_equal(model.flat.grad, gradients)


@pytest.mark.parametrize("freeze", [None, BELOW, "blocks.2,final_norm"])
def test_a_part_that_is_frozen_trains_nothing(freeze):
    model = new_model(freeze)
    network, frozen = model.network, frozen_parts(freeze, model.config)
    declared = {name for name, numbers in network.parts.items() if numbers}
    assert {name for name in declared if not network.trains(name)} == frozen
    assert network.lowest == (2 if freeze == BELOW else 0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_writing_some_parameters_leaves_the_others(precision):
    model = new_model(BELOW, "numba")
    model.use_precision(precision)
    before = {name: value.copy() for name, value in model.flat.compute.items()}
    written = "blocks.0.mlp.expansion.weight", "blocks.2.mlp.expansion.weight"  # one is frozen
    ones = {name: np.ones(model.flat.shapes[name], np.float32) for name in written}
    model.flat.write(ones)
    for name, value in model.flat.compute.items():
        if name in written:
            assert (to_float32(value) == 1).all()
        else:
            np.testing.assert_array_equal(value, before[name], name)
    with pytest.raises(KeyError, match=r"blocks\.4"):
        model.flat.write({"blocks.4.mlp.expansion.weight": ones[written[0]]})


def test_recorded_passes_follow_what_is_frozen():
    """Passes are recorded with the places of the arrays that they read and write."""
    plain, model = new_model(None, "numba"), new_model(None, "numba")
    for freeze in (None, BELOW, None):
        model.freeze(freeze)
        for _ in range(16):
            for each in (plain, model):
                each.zero_gradients()
                each.loss_and_gradients(*batch())
            for name, gradient in model.gradients.items():
                np.testing.assert_array_equal(gradient, plain.gradients[name], name)
            for name in model.gradients:
                for each in (plain, model):
                    each.parameters[name][...] *= np.float32(1.01)


def test_a_storage_for_each_role():
    """Matrices are read in 16 bits, and everything else in float32."""
    model = new_model(None, "numba")
    storage = {role: BFLOAT16 if role == Role.MATRIX else None for role in Role}
    model.flat.store(storage)
    model.flat.refresh()
    (part,) = model.flat.ranges(Role.MATRIX)
    assert [copy.part for copy in model.flat.copies] == [part]
    assert len(model.flat.ranges(*Role)) == 3
    optimizer = AdamW(model, 1e-2)
    model.flat.grad[:] = 1
    optimizer.step()
    np.testing.assert_array_equal(
        model.flat.copy_of(part), round_to(model.flat.data[part], BFLOAT16)
    )
    for spec in model.flat.specs:
        read = model.flat.compute[spec.name]
        assert read.dtype == (BFLOAT16 if spec.role == Role.MATRIX else np.float32)
    model.freeze("blocks.1")
    assert model.flat.compute["blocks.1.mlp.expansion.weight"].dtype == BFLOAT16
    assert model.flat.compute["blocks.1.mlp_norm.weight"].dtype == np.float32


def test_the_config_of_a_model_says_nothing_of_it(tmp_path):
    model = new_model(BELOW, "numba")
    model.use_precision("bfloat16")
    model.save(tmp_path / "model.safetensors")
    loaded = TransformerModel.load(tmp_path / "model.safetensors")
    assert loaded.frozen is None and loaded.config == model.config == ModelConfig(13, 8, 4, 4, 12)
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[name], value)


@pytest.mark.parametrize("plan", [RecomputePlan(enabled=False), RecomputePlan(1)])
def test_a_pass_keeps_activations_only_where_something_is_trained(plan, monkeypatch):
    def peak(freeze):
        model = new_model(freeze)
        model.use_recompute(plan)
        return rented_at_the_peak(monkeypatch, model, lambda x: x.loss_and_gradients(*batch()))

    peaks = [peak(freeze) for freeze in (None, BELOW, "embedding,blocks.0-3")]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[1]
    if not plan.enabled:
        assert peaks[1] < 0.8 * peaks[0] and peaks[2] < 0.6 * peaks[0]


@pytest.mark.parametrize("settings", [{}, LLAMA, UNTIED], ids=str)
def test_every_matrix_is_built_in_one_place(settings, monkeypatch):
    """So one place replaces them all, by adapters for example."""
    built = []

    class Own(Linear):
        def __init__(self, scope, *arguments, **named):
            super().__init__(scope, *arguments, **named)
            built.append(f"{scope.name}.weight")

    monkeypatch.setattr(layers, "Linear", Own)
    specs = new_model(**settings).flat.specs
    assert built == [spec.name for spec in specs if spec.role in (Role.MATRIX, Role.HEAD)]
