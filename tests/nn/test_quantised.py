"""Models whose weights are blocks of integers: what is frozen computes as its values would."""

import numpy as np
import pytest

from smallmind import InputError, KeyValueCache, Precision, TransformerModel, gradient_check
from smallmind.kernels.number_types import BLOCK, DTYPES, is_quantised, round_to, to_float32
from smallmind.nn.parameters import Role
from smallmind.parts import QUANTISED
from smallmind.settings.config import Adapter
from smallmind.settings.presets import ARCHITECTURES
from tests import architectures

BLOCKS = {name: DTYPES[name] for name in QUANTISED}
ODD = {**ARCHITECTURES["llama"], "mlp_width": 80, "head_size": 20}  # 80 and 40 are no whole blocks
MODELS = {**architectures.MODELS, "odd sizes": ODD}
V, T = 61, 24
ALL_BUT_LAST = "embedding,blocks.0"


def made(name, backend="numpy", precision=None, freeze=ALL_BUT_LAST, **settings):
    """A model with larger weights than at the start, so that all of its parts matter."""
    settings = {**MODELS[name], **settings}
    model = TransformerModel(V, T, 64, 2, 2, backend=backend, **settings)
    random = np.random.default_rng(5)
    for values in model.parameters.values():
        values += random.normal(0, 0.1, values.shape).astype(values.dtype)
    model.freeze(freeze)
    if precision:
        model.use_precision(precision)
    return model


def exact(model, backend="numpy"):
    """A float32 model of the values that the blocks stand for."""
    same = TransformerModel(model.config, backend=backend, freeze=model.frozen)
    same.flat.write(model.parameters)
    return same


def batch(B=3, T=T):
    tokens = np.random.default_rng(1).integers(0, V, (B, T + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("name", MODELS)
def test_frozen_matrices_and_tables_are_blocks_and_all_else_is_float32(name, precision):
    model, before = made(name, precision=precision), made(name)
    kinds = {spec.name: model.flat.compute[spec.name].dtype for spec in model.flat.specs}
    for spec in model.flat.specs:
        stored, values = model.flat.compute[spec.name], before.parameters[spec.name]
        rows = values.T if spec.role in (Role.MATRIX, Role.HEAD) else values
        if is_quantised(stored.dtype):
            assert not spec.trainable and stored.dtype == BLOCKS[precision]
            blocks = round_to(rows, stored.dtype)
            np.testing.assert_array_equal(stored, blocks)
            rows = to_float32(blocks)
            expected = rows.T if spec.role != Role.EMBEDDING else rows
            np.testing.assert_array_equal(model.parameters[spec.name], expected)
            assert not model.parameters[spec.name].flags.writeable
        else:
            is_odd = rows.shape[-1] % BLOCK > 0
            assert spec.trainable or rows.ndim == 1 or is_odd or not spec.quantises
            np.testing.assert_array_equal(model.parameters[spec.name], values)
    assert not is_quantised(kinds.get("position_embedding.weight", np.dtype(np.float32)))
    assert not is_quantised(kinds.get("bigram_embedding.weight", np.dtype(np.float32)))
    assert is_quantised(kinds["token_embedding.weight"])
    assert sum(map(is_quantised, kinds.values())) == (3 if name == "odd sizes" else 5)


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_values(name, backend, precision):
    model = made(name, backend, precision)
    same = exact(model)
    close(model.forward(batch()[0]), same.forward(batch()[0]))
    loss, expected = model.loss_and_gradients(*batch()), same.loss_and_gradients(*batch())
    assert loss == pytest.approx(expected, rel=1e-5)
    assert list(model.gradients) == list(same.gradients)
    for gradient, wanted in zip(model.gradients.values(), same.gradients.values(), strict=True):
        close(gradient, wanted)


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("freeze", ["blocks.0", "blocks.1", "blocks.0-1,final_norm"])
def test_gradients_pass_through_frozen_blocks(freeze, precision):
    model = made("GPT-2, untied", precision=precision, freeze=freeze)
    found = gradient_check(model)
    assert found.ok, found


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_an_adapter_beside_blocks(name, precision):
    adapter, random = Adapter(3, 5.0), np.random.default_rng(2)
    model, compiled = (
        TransformerModel(V, T, 64, 2, 2, backend=backend, adapter=adapter, **MODELS[name])
        for backend in ("numpy", "numba")
    )
    values = {x: 0.2 * random.standard_normal(shape) for x, shape in model.flat.shapes.items()}
    for each in model, compiled:
        each.flat.write({name: value.astype(np.float32) for name, value in values.items()})
        each.use_precision(precision)
    assert is_quantised(model.flat.compute["blocks.1.attention.qkv.weight"].dtype)
    losses = [each.loss_and_gradients(*batch()) for each in (model, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, gradient in model.gradients.items():
        assert "lora" in name
        close(compiled.gradients[name], gradient)
    found = gradient_check(model)
    assert found.ok, found


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("name", MODELS)
def test_decoding_is_close_to_a_pass_over_the_whole_text(name, backend, precision):
    """It rounds activations to 8 bits."""
    model = made(name, backend, precision)
    ids = batch()[0]
    wanted = model.forward(ids)
    cache = KeyValueCache(model, len(ids))
    logits = [model.decode(ids[:, :9], cache)]
    logits += [model.decode(ids[:, t : t + 1], cache) for t in range(9, T)]
    error = np.stack(logits, 1) - wanted[:, 8:]
    assert np.sqrt((error**2).mean()) < 0.02 * wanted.std()


def test_a_model_without_anything_frozen_is_refused():
    model = made("Llama", freeze=None)
    for precision in BLOCKS:
        with pytest.raises(
            InputError, match=r"only for frozen weights.*to run a model.*--lora-rank.*--freeze"
        ):
            model.use_precision(precision)
    assert model.precision == Precision.FLOAT32


@pytest.mark.parametrize("then", ["float32", "q4_0", "q8_0", "bfloat16"])
def test_another_precision_has_the_values_that_the_blocks_had(then):
    model = made("Llama", "numba", "q8_0")
    values = {name: value.copy() for name, value in model.parameters.items()}
    model.use_precision(then)
    changed = [name for name, x in model.parameters.items() if not np.array_equal(x, values[name])]
    assert bool(changed) == (then in ("q4_0", "bfloat16"))
    model.use_precision("float32")
    ids = batch()[0]
    close(model.forward(ids), exact(model).forward(ids))


@pytest.mark.parametrize("freeze", [None, "blocks.1", "embedding,blocks.0-1"])
def test_other_parts_are_frozen_with_the_values_that_they_have(freeze):
    model = made("GPT-2", precision="q8_0")
    values = {name: value.copy() for name, value in model.parameters.items()}
    model.freeze(freeze)
    for spec in model.flat.specs:
        found, before = model.parameters[spec.name], values[spec.name]
        if is_quantised(model.flat.compute[spec.name].dtype):
            assert np.abs(found - before).max() <= np.abs(before).max() / 250
        else:
            np.testing.assert_array_equal(found, before)
    assert model.loss_and_gradients(*batch()) > 0


def test_blocks_are_written_as_they_are():
    """Values would not lead to those of another quantiser."""
    model = made("Llama", precision="q4_0")
    random = np.random.default_rng(3)
    name = "blocks.0.mlp.projection.weight"
    blocks = np.zeros_like(model.flat.compute[name])
    blocks["scale"] = 0.01
    blocks["q"] = random.integers(0, 256, blocks["q"].shape)
    model.flat.write({name: blocks})
    np.testing.assert_array_equal(model.flat.compute[name], blocks)
    np.testing.assert_array_equal(model.parameters[name], to_float32(blocks).T)


def test_a_saved_model_has_the_values(tmp_path):
    model = made("Llama", precision="q8_0")
    model.save(tmp_path / "model.safetensors")
    loaded = TransformerModel.load(tmp_path / "model.safetensors", "numpy")
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[name], value)
    ids = batch()[0]
    close(model.forward(ids), loaded.forward(ids))


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize("name", ["Llama", "GPT-2, untied"])
def test_everything_else_takes_blocks_in_rows_after_a_model_has_written(tmp_path, name, precision):
    """Products of decoding read them in groups of rows, in models that only run."""
    made(name, freeze=None).save(tmp_path / "model.safetensors")
    model, plain = (
        TransformerModel.load(tmp_path / "model.safetensors", backend, precision)
        for backend in ("numba", "numpy")
    )
    ids, values = batch()[0], model.parameters
    before = {name: value.copy() for name, value in values.items()}
    logits = model.forward(ids)

    def written(model):
        cache = KeyValueCache(model, len(ids))
        return [model.decode(part, cache) for part in (ids[:, :9], *np.split(ids[:, 9:14], 5, 1))]

    first = written(model)
    kinds = [handle.matrix.in_groups for handle in model.flat._handles]
    assert sum(kinds) == 9  # four matrices of each block, and one that gives logits
    # A difference in the last bit may be rounded to another integer.
    wanted = np.array(written(plain))
    assert np.sqrt(((np.array(first) - wanted) ** 2).mean()) < 0.01 * wanted.std()
    for name, value in before.items():
        np.testing.assert_array_equal(values[name], value)
    np.testing.assert_array_equal(written(model), first)
    np.testing.assert_array_equal(model.forward(ids), logits)
    np.testing.assert_array_equal(written(model), first)
    for name in before:
        np.testing.assert_array_equal(model.flat.own(name), plain.flat.own(name))
