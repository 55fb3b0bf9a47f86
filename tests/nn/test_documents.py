"""A model that keeps documents apart: nothing passes from one to the next, in any architecture."""

import dataclasses

import numpy as np
import pytest

from smallmind import (
    InputError,
    ModelConfig,
    Precision,
    TransformerModel,
    gradient_check,
)
from smallmind.kernels import compiled, reference
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.generation import generate

V, T, DOCUMENT = 11, 24, 3
ARCHS = ARCHITECTURES | {
    "everything": ARCHITECTURES["modern"]
    | {"x0_scalars": True, "n_kv_head": 1, "logit_softcap": 3.0, "bigram_rows": 50},
    "no positions": ARCHITECTURES["llama"] | {"position": "none"},
}


def make(arch, **settings):
    """A model away from its initial values, where some parts have no effect."""
    fields = {**ARCHS[arch], "document_token": DOCUMENT, **settings}
    model = TransformerModel(V, T, 24, 3, 4, **fields)
    random = np.random.default_rng(1)
    for value in model.parameters.values():
        value += 0.3 * random.standard_normal(value.shape)
    model.flat.refresh()
    return model


def plain(arch, **settings):
    return make(arch, backend="numpy", dtype=np.float64, **settings)


def document(length, seed):
    """A document of `length` tokens, which begins at its token."""
    ids = np.random.default_rng(seed).integers(DOCUMENT + 1, V, length).astype(np.int32)
    ids[0] = DOCUMENT
    return ids


def batch():
    """Windows that begin in the middle of a document, and hold a few others."""
    ids = np.random.default_rng(2).integers(0, V, (3, T + 1)).astype(np.int32)
    ids[0, 5:7] = ids[1, T - 1] = ids[2, 0] = DOCUMENT
    return ids[:, :-1], ids[:, 1:]


def gradients(model, scale=1.0):
    model.zero_gradients()
    model.passes = 4
    return model.loss_and_gradients(*batch(), scale), model.flat.grad / np.float32(scale)


def loss_of_the_last(model, ids, targets, count):
    """The gradients of the mean loss of the last `count` tokens of a window, by name."""
    kernels = model.workspace.kernels

    def objective(_windows, losses, dlogits, logits, targets, _scale):
        kernels.cross_entropy(losses, dlogits, logits, targets, 1 / count)
        dlogits[:-count] = 0

    model.zero_gradients()
    model.loss_and_gradients(ids[None], targets[None], objective=objective)
    return {name: gradient.copy() for name, gradient in model.gradients.items()}


@pytest.mark.parametrize("arch", ARCHS)
def test_a_document_after_another_equals_the_document_alone(arch):
    first, second = document(9, 1)[1:], document(13, 2)  # the window begins inside the first
    window, n = np.concatenate((first, second)), len(second)
    targets = np.roll(window, -1)
    model, alone = plain(arch), plain(arch)
    if "position_embedding.weight" in model.parameters:  # alone it is at other positions
        position = alone.parameters["position_embedding.weight"]
        position[:n] = model.parameters["position_embedding.weight"][len(first) : len(window)]
    expected = alone.forward(second[None])[0]
    np.testing.assert_allclose(model.forward(window[None])[0, len(first) :], expected, atol=1e-12)
    together = loss_of_the_last(model, window, targets, n)
    apart = loss_of_the_last(alone, second, targets[len(first) :], n)
    for name, gradient in together.items():
        if name == "position_embedding.weight":
            np.testing.assert_allclose(gradient[: len(first)], 0)
            gradient = np.roll(gradient, -len(first), axis=0)
        np.testing.assert_allclose(gradient, apart[name], atol=1e-12, err_msg=name)


def leaks(model, place=11):
    """True if a token of the first document changes a bit of what the second computes."""
    ids, targets = (x.copy() for x in batch())
    ids[:, :place][ids[:, :place] == DOCUMENT] = 0
    ids[:, place] = DOCUMENT
    changed = ids.copy()
    changed[:, place - 1] = changed[:, place - 1] % 2 + 5
    changed[:, 2] = V - 1
    n = T - place
    logits = [model.forward(x)[:, place:] for x in (ids, changed)]
    losses = [model.losses(x, targets)[:, place:] for x in (ids, changed)]
    found = [loss_of_the_last(model, x[0], targets[0], n) for x in (ids, changed)]
    gradient, other = ({n: x for n, x in each.items() if "embedding" not in n} for each in found)
    pairs = [logits, losses, *((gradient[name], other[name]) for name in gradient)]
    return any(not np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_token_of_one_document_changes_nothing_in_the_next(arch):
    for model in (make(arch), plain(arch)):
        for place in (1, 11, T - 1):
            assert not leaks(model, max(place, 4))
    assert leaks(make(arch, document_token=None))


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.BFLOAT16])
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_nor_does_it_in_16_bits(arch, precision):
    model = make(arch)
    model.use_precision(precision)
    ids = batch()[0].copy()
    ids[:, :9] = 5
    ids[:, 9] = DOCUMENT
    before = model.forward(ids)[:, 9:]
    ids[:, :9] = 7
    np.testing.assert_array_equal(model.forward(ids)[:, 9:], before)


def test_a_leak_of_attention_or_of_pairs_is_noticed(monkeypatch):
    starts, pairs = compiled.document_starts, compiled.bigrams

    def early(firsts, *arguments):
        starts(firsts, *arguments)
        firsts -= firsts > 0

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "document_starts", early)
        assert leaks(make("gpt2"))
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "bigrams", lambda *arguments: pairs(*arguments[:4], -1))
        assert leaks(make("modern"))
        assert not leaks(make("llama"))


def test_a_wrong_gradient_of_attention_in_documents_is_noticed(monkeypatch):
    backward = reference.attention_backward

    def without_documents(*arguments):
        *others, _firsts, scale = arguments
        backward(*others, None, scale)

    monkeypatch.setattr(reference, "attention_backward", without_documents)
    assert max(gradient_check(plain("gpt2"), *batch()).errors.values()) > 1e-3


@pytest.mark.parametrize("arch", ARCHS)
def test_windows_without_the_token_give_the_same_bits_as_a_model_without_documents(arch):
    results = []
    for token in (V - 1, None):
        model = make(arch, dropout=0.2, document_token=token)
        ids, targets = (np.minimum(x, V - 2) for x in batch())
        loss = model.loss_and_gradients(ids, targets)
        results.append((loss, model.forward(ids), model.flat.grad.copy()))
    for masked, whole in zip(*results, strict=True):
        np.testing.assert_array_equal(masked, whole)


def test_a_model_without_documents_rents_no_more_than_before():
    held = {}
    for token in (None, DOCUMENT):
        model, names = make("gpt2", document_token=token), []

        def wrap(name, kernel, names=names):
            return lambda *arguments: names.append(name) or kernel(*arguments)

        before = model.workspace.pool.statistics()
        with model.workspace.wrapped_kernels(wrap):
            gradients(model)
        after = model.workspace.pool.statistics()
        assert after.bytes_rented == before.bytes_rented
        held[token] = after.rents - before.rents
        assert names.count("document_starts") == (token is not None)
    assert held[DOCUMENT] == held[None] + 1


def test_a_text_goes_on_as_if_its_document_were_all_of_it():
    tokenizer = Tokenizer("\nabcdefgh")
    config = ModelConfig(9, T, 3, 4, 24, **ARCHS["llama"], document_token=0)
    model = TransformerModel(config)
    settings = {"max_tokens": 8, "temperature": 0}
    alone = generate(model, tokenizer, "\nab", **settings)
    after = generate(model, tokenizer, "hgfe\nab", **settings)
    assert after == "hgfe" + alone


def test_the_token_is_one_of_the_vocabulary():
    with pytest.raises(InputError, match="document_token=11 must be below vocab_size=11"):
        ModelConfig(V, T, document_token=V)
    assert dataclasses.replace(ModelConfig(V, T), document_token=V - 1).document_token == V - 1
