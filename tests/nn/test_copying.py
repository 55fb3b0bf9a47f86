"""Models and what belongs to them can be copied and pickled, as other objects of Python."""

import copy
import pickle

import numpy as np
import pytest

import smallmind
from smallmind.nn.recompute import RecomputePlan
from smallmind.settings.config import Adapter, Precision
from tests.exchange.models import TEXT, model_of, tokenizer_of

WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}
IDS = np.arange(24, dtype=np.int32).reshape(2, 12)
SHAPE = {"block_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}


@pytest.fixture(params=WAYS)
def copied(request):
    return WAYS[request.param]


def assert_alike(found, model):
    assert (found.config, found.backend, found.precision) == (
        model.config,
        model.backend,
        model.precision,
    )
    np.testing.assert_array_equal(found.forward(IDS), model.forward(IDS))


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_copy_computes_the_same_and_is_its_own(copied, backend):
    model = smallmind.TransformerModel(64, **SHAPE, dropout=0.1, seed=3, backend=backend)
    model.loss_and_gradients(IDS, IDS)
    found = copied(model)
    assert_alike(found, model)
    np.testing.assert_array_equal(found.flat.grad, model.flat.grad)
    # Both drop the same in the next pass.
    losses = [each.loss_and_gradients(IDS, IDS) for each in (model, found)]
    assert losses[0] == losses[1]
    np.testing.assert_array_equal(found.flat.grad, model.flat.grad)
    found.parameters["final_norm.weight"][:] = 0
    assert model.parameters["final_norm.weight"].all()


def test_double_precision_is_kept(copied):
    model = smallmind.TransformerModel(64, **SHAPE, backend="numpy", dtype=np.float64)
    found = copied(model)
    assert_alike(found, model)
    assert found.parameters["token_embedding.weight"].dtype == np.float64


def test_settings_of_training_are_kept(copied):
    adapter = Adapter(2, 4.0)
    model = smallmind.TransformerModel(64, **SHAPE, adapter=adapter, freeze="blocks.0")
    model.use_precision(Precision.BFLOAT16)
    model.use_recompute(RecomputePlan(enabled=True))
    model.micro_batch_size, model.tokenizer_digest = 1, "of a tokenizer"
    found = copied(model)
    assert_alike(found, model)
    for name in ("adapter", "frozen", "micro_batch_size", "tokenizer_digest"):
        assert getattr(found, name) == getattr(model, name)
    assert vars(found.recompute_plan) == vars(model.recompute_plan)
    assert found.gradients.keys() == model.gradients.keys()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "q8_0", "q4_0"])
def test_a_model_that_only_runs_is_copied_as_it_is_stored(tmp_path, copied, precision):
    tokenizer = tokenizer_of("byte")
    model_of("Llama", tokenizer, n_embd=64, head_size=16).save(tmp_path / "model.safetensors")
    model = smallmind.TransformerModel.load(tmp_path / "model.safetensors", precision=precision)
    found = copied(model)
    assert_alike(found, model)
    assert not found.flat.trained


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_tokenizers_are_copied_too(copied, kind):
    tokenizer = tokenizer_of(kind)
    found = copied(tokenizer)
    assert found.saved == tokenizer.saved
    np.testing.assert_array_equal(found.encode(TEXT), tokenizer.encode(TEXT))


def test_an_optimizer_is_copied_with_its_model(copied):
    model = smallmind.TransformerModel(64, **SHAPE)
    optimizer = smallmind.AdamW(model)
    found_model, found = copied((model, optimizer))
    for each, steps in ((model, optimizer), (found_model, found)):
        each.loss_and_gradients(IDS, IDS)
        steps.step(max_grad_norm=1.0)
    np.testing.assert_array_equal(found_model.flat.data, model.flat.data)
