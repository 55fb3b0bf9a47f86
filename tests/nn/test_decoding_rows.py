"""A step of decoding gives a sequence the same bits alone and among others, in every precision."""

import numpy as np
import pytest

from smallmind import KeyValueCache, TransformerModel
from smallmind.settings.config import Adapter, Precision
from smallmind.settings.presets import ARCHITECTURES
from tests import architectures

ODD = {**ARCHITECTURES["llama"], "mlp_width": 83, "head_size": 20}
MODELS = {**architectures.MODELS, "odd sizes": ODD}
V, T, STEPS = 61, 24, 3


def trained(name, adapter=None):
    """A model with larger weights than at the start, so that all of its parts matter."""
    model = TransformerModel(V, T, 64, 2, 2, adapter=adapter, **MODELS[name])
    random = np.random.default_rng(5)
    model.flat.write(
        (name, values + random.normal(0, 0.1, values.shape).astype(values.dtype))
        for name, values in model.parameters.items()
    )
    return model


def running(model, precision):
    """The model as it is loaded to run only."""
    loaded = TransformerModel.unfilled(model.config, precision=precision, adapter=model.adapter)
    loaded.flat.write(model.parameters)
    return loaded


def decoded(model, prompts, tokens):
    """prompts (B, T), tokens (B, STEPS) -> the logits after each of these steps."""
    cache = KeyValueCache(model, len(prompts))
    model.decode(prompts, cache)
    steps = [model.decode(tokens[:, i : i + 1], cache) for i in range(tokens.shape[1])]
    return np.stack(steps, axis=1)


def assert_rows_are_independent(model):
    random = np.random.default_rng(1)
    # A prompt of one token is a step of decoding too.
    prompts, tokens = random.integers(0, V, (17, 1)), random.integers(0, V, (17, STEPS))
    alone = np.concatenate([decoded(model, prompts[i:][:1], tokens[i:][:1]) for i in range(17)])
    for B in (2, 3, 5, 8, 17):
        np.testing.assert_array_equal(decoded(model, prompts[:B], tokens[:B]), alone[:B])


PRECISIONS = [p for p in Precision if p != Precision.AUTO]
# Each model in two precisions, and one of odd sizes in all.
DECODED = [(name, PRECISIONS[(i + j) % 5]) for i, name in enumerate(MODELS) for j in (0, 2)]
DECODED += [("odd sizes", precision) for precision in PRECISIONS]


@pytest.mark.parametrize(("name", "precision"), dict.fromkeys(DECODED))
def test_sequences_that_are_decoded_together_have_the_bits_that_each_has_alone(name, precision):
    assert_rows_are_independent(running(trained(name), precision))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "q8_0"])
def test_so_they_have_with_an_adapter(precision):
    model = trained("Qwen3, untied", Adapter(rank=4, alpha=8.0))
    assert_rows_are_independent(running(model, precision))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["GPT-2", "modern"])
def test_so_they_have_in_models_that_train(name, precision):
    model = trained(name)
    model.use_precision(Precision(precision))
    assert_rows_are_independent(model)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_only_runs_has_the_losses_of_the_one_that_was_trained(name, precision):
    model = trained(name)
    loaded = running(model, precision)
    model.use_precision(Precision(precision))
    tokens = np.random.default_rng(2).integers(0, V, (4, T + 1)).astype(np.int32)
    expected = model.losses(tokens[:, :-1], tokens[:, 1:])
    np.testing.assert_array_equal(loaded.losses(tokens[:, :-1], tokens[:, 1:]), expected)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "q8_0"])
def test_matrices_of_models_that_only_run_are_stored_by_output_and_shown_as_they_are(
    backend, precision
):
    if (backend, precision) == ("numpy", "bfloat16"):
        pytest.skip("needs compiled kernels")
    model = trained("Llama")
    loaded = TransformerModel.unfilled(model.config, backend, precision)
    loaded.flat.write(model.parameters)
    name = "blocks.1.mlp.expansion.weight"
    rows, columns = model.parameters[name].shape
    assert len(loaded.flat.compute[name]) == columns
    assert len(model.flat.compute[name]) == rows
    for name, values in model.parameters.items():
        assert loaded.parameters[name].shape == values.shape
        assert not loaded.parameters[name].flags.writeable
        if precision == "float32":
            np.testing.assert_array_equal(loaded.parameters[name], values)
