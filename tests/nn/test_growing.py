"""A model with more tokens than before is the same to the old ones."""

import numpy as np
import pytest

from smallmind import TransformerModel
from smallmind.nn.parameters import grown
from smallmind.settings.presets import ARCHITECTURES

V, NEW, T = 17, 4, 13
MODELS = {
    "gpt2": ARCHITECTURES["gpt2"],
    "gpt2 with its own head": ARCHITECTURES["gpt2"] | {"tie_weights": False},
    "llama": ARCHITECTURES["llama"],
    "tied llama": ARCHITECTURES["llama"] | {"tie_weights": True},
    "modern": ARCHITECTURES["modern"],
    "modern with hashed pairs": ARCHITECTURES["modern"] | {"bigram_rows": 50},
    "tied modern": ARCHITECTURES["modern"] | {"tie_weights": True},
}
PAIRS = [name for name, parts in MODELS.items() if parts.get("bigram_rows")]


def made(name, vocab_size=V, seed=1, **fields):
    shape = {"block_size": T, "n_embd": 24, "n_layer": 2, "n_head": 4}
    return TransformerModel(vocab_size, seed=seed, **{**shape, **MODELS[name], **fields})


def with_more(name, model, new=NEW, seed=2):
    """The model with more tokens, as a run makes it."""
    pairs = (model.config.bigram_vocab or model.config.vocab_size) if name in PAIRS else None
    more = made(name, model.config.vocab_size + new, seed, bigram_vocab=pairs)
    shapes = more.flat.shapes
    more.flat.write({name: grown(x, shapes[name]) for name, x in model.parameters.items()})
    return more


@pytest.fixture(params=MODELS)
def pair(request):
    """A model whose parameters all matter, and the same with more tokens."""
    model = made(request.param)
    random = np.random.default_rng(3)
    model.flat.data[...] += random.normal(0, 0.2, model.flat.data.shape).astype(np.float32)
    return request.param, model, with_more(request.param, model)


def ids_of(shape, last=V):
    return np.random.default_rng(4).integers(0, last, shape).astype(np.int32)


def test_old_tokens_have_the_logits_that_they_had(pair):
    _, model, more = pair
    ids = ids_of((3, T))
    found = more.forward(ids)
    np.testing.assert_allclose(found[..., :V], model.forward(ids), rtol=0, atol=2e-6)
    # As likely as the others on average.
    mean = found[..., :V].mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(found[..., V:], np.repeat(mean, NEW, axis=-1), rtol=0, atol=1e-4)


def test_everything_of_old_tokens_and_their_pairs_is_kept(pair):
    name, model, more = pair
    assert more.config.bigram_vocab == (V if name in PAIRS else None)
    for part, value in model.parameters.items():
        kept = more.parameters[part][tuple(map(slice, value.shape))]
        np.testing.assert_array_equal(kept, value)
        if "bigram" in part or V not in value.shape:
            assert more.parameters[part].shape == value.shape
    assert np.isfinite(more.forward(ids_of((2, T), V + NEW))).all()


def test_a_model_grows_again(pair):
    name, model, more = pair
    again, ids = with_more(name, more, new=2), ids_of((2, T))
    assert again.config.vocab_size == V + NEW + 2
    np.testing.assert_allclose(again.forward(ids)[..., :V], model.forward(ids), rtol=0, atol=2e-6)


def test_it_is_saved_and_loaded(pair, tmp_path):
    _, _, more = pair
    more.save(tmp_path / "model.safetensors")
    again = TransformerModel.load(tmp_path / "model.safetensors")
    assert again.config == more.config
    np.testing.assert_array_equal(again.flat.data, more.flat.data)


def test_nothing_changes_without_new_tokens():
    model = made("modern")
    shapes = model.flat.shapes
    for name, value in model.parameters.items():
        value = grown(value, shapes[name])
        np.testing.assert_array_equal(value, model.parameters[name])
