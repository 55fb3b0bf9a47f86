"""Windows of several documents that are given: each computes as if it were alone."""

import numpy as np
import pytest

from smallmind import CheckpointStrategy, InputError, Precision, TransformerModel
from smallmind.kernels import compiled, reference
from smallmind.kernels.half import BFLOAT16, FLOAT16, round_to
from smallmind.nn import transformer
from smallmind.nn.recompute import RecomputePlan
from smallmind.settings.presets import ARCHITECTURES

V, T = 11, 23
ARCHS = ARCHITECTURES | {
    "everything": ARCHITECTURES["modern"]
    | {"x0_scalars": True, "n_kv_head": 1, "logit_softcap": 3.0, "bigram_rows": 50},
    "positions and pairs": ARCHITECTURES["gpt2"] | {"bigram_rows": 2**14},
}
LENGTHS = [(7, 1, 12, 3), (23,), (1, 20, 2)]


def make(arch, **settings):
    """A model away from its initial values, where some parts have no effect."""
    model = TransformerModel(V, T, 24, 3, 4, **ARCHS[arch], **settings)
    random = np.random.default_rng(1)
    for value in model.parameters.values():
        value += 0.3 * random.standard_normal(value.shape)
    model.flat.refresh()
    return model


def packed(lengths=LENGTHS):
    """ids, targets and firsts of windows with documents of these lengths."""
    random = np.random.default_rng(2)
    ids, targets = (random.integers(0, V, (len(lengths), T)).astype(np.int32) for _ in range(2))
    firsts = np.array([np.repeat(np.cumsum((0, *each[:-1])), each) for each in lengths], np.int32)
    return ids, targets, firsts


def alone(lengths=LENGTHS):
    """The documents of `packed`, one after another."""
    _ids, _targets, _ = packed(lengths)
    for row, each in enumerate(lengths):
        ends = np.cumsum(each)
        for first, last in zip(ends - each, ends, strict=True):
            yield slice(row, row + 1), slice(int(first), int(last))


def gradients(model, *arguments, **named):
    model.zero_gradients()
    loss = model.loss_and_gradients(*arguments, **named)
    return loss, model.flat.grad.copy()


def one_by_one(model):
    """Losses and the gradient of their mean, of each document in a window of its own."""
    ids, targets, _ = packed()
    losses, total = np.empty(ids.shape), 0.0
    for rows, places in alone():
        own = [np.ascontiguousarray(x[rows, places]) for x in (ids, targets)]
        losses[rows, places] = model.losses(*own)
        share = own[0].size / ids.size
        total = total + gradients(model, *own, share)[1].astype(np.float64)
    return losses, total


def differ(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("arch", ARCHS)
def test_each_document_computes_as_if_it_were_alone(arch, backend):
    model = make(arch, backend=backend)
    ids, targets, firsts = packed()
    losses, gradient = one_by_one(model)
    np.testing.assert_allclose(model.losses(ids, targets, firsts=firsts), losses, atol=2e-5)
    loss, found = gradients(model, ids, targets, firsts=firsts)
    assert loss == pytest.approx(losses.mean(), abs=1e-5)
    assert differ(found, gradient) < 1e-5
    assert differ(gradients(model, ids, targets)[1], gradient) > 1e-2  # as one document


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.BFLOAT16])
@pytest.mark.parametrize("arch", ["gpt2", "everything"])
def test_in_16_bits_up_to_rounding(arch, precision):
    model = make(arch)
    ids, targets, firsts = packed()
    exact = gradients(model, ids, targets, firsts=firsts)[1]
    model.use_precision(precision)
    found = gradients(model, ids, targets, 1.0, firsts=firsts)[1]
    assert differ(found, exact) < 0.06
    assert differ(gradients(model, ids, targets)[1], exact) > 0.1


@pytest.mark.parametrize("arch", ARCHS)
def test_recompute_and_smaller_batches_change_nothing(arch):
    ids, targets, firsts = packed()
    weights = (np.arange(ids.size).reshape(ids.shape) % 3 == 0).astype(np.float32)
    named = {"firsts": firsts, "weights": weights}
    model = make(arch)
    loss, gradient = gradients(model, ids, targets, **named)
    model.use_recompute(RecomputePlan.of(CheckpointStrategy.EVERY_LAYER, 4, 1))
    np.testing.assert_array_equal(gradients(model, ids, targets, **named)[1], gradient)
    model.micro_batch_size = 1
    again, found = gradients(model, ids, targets, **named)
    assert again == pytest.approx(loss, rel=1e-6) and differ(found, gradient) < 1e-5


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_a_repeated_pass_reads_the_documents_of_its_own_batch(arch):
    model = make(arch)
    batches = [packed(), packed([(3, 20), (11, 12), (23,)]), packed([(1, 1, 21)] * 3)]
    expected = [gradients(model, i, t, firsts=f) for i, t, f in batches]
    model.forget_recorded(after=1)
    for _ in range(3):
        for (ids, targets, firsts), (loss, gradient) in zip(batches, expected, strict=True):
            found = gradients(model, ids, targets, firsts=firsts)
            assert found[0] == loss
            np.testing.assert_array_equal(found[1], gradient)
    ids, targets, _ = batches[0]
    fresh = gradients(make(arch), ids, targets)
    np.testing.assert_array_equal(gradients(model, ids, targets)[1], fresh[1])


def test_the_gradient_is_that_of_finite_differences():
    for arch in ("positions and pairs", "everything"):
        model = make(arch, backend="numpy", dtype=np.float64)
        ids, targets, firsts = packed()
        gradients(model, ids, targets, firsts=firsts)
        random = np.random.default_rng(4)
        for name, value in model.parameters.items():
            flat, gradient = value.reshape(-1), model.gradients[name].reshape(-1)
            for place in random.choice(flat.size, min(3, flat.size), replace=False):
                before, losses = flat[place], []
                for step in (1e-6, -1e-6):
                    flat[place] = before + step
                    losses.append(model.losses(ids, targets, firsts=firsts).mean())
                flat[place] = before
                slope = (losses[0] - losses[1]) / 2e-6
                assert gradient[place] == pytest.approx(slope, abs=1e-8, rel=1e-5), name


def test_planted_errors_are_noticed(monkeypatch):
    def wrong(arch):
        model = make(arch)
        ids, targets, firsts = packed()
        return differ(gradients(model, ids, targets, firsts=firsts)[1], one_by_one(model)[1])

    def no_restart(positions, firsts):
        positions[...] = np.arange(T)

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "document_positions", no_restart)
        assert wrong("gpt2") > 1e-2 and wrong("llama") < 1e-5
    pairs = compiled.bigrams
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "bigrams", lambda *arguments: pairs(*arguments[:6]))
        assert wrong("modern") > 1e-2 and wrong("llama") < 1e-5


@pytest.mark.parametrize("kernels", [compiled, reference], ids=["compiled", "reference"])
def test_places_in_documents(kernels):
    firsts = packed()[2]
    positions = np.empty_like(firsts)
    kernels.document_positions(positions, firsts)
    for rows, places in alone():
        np.testing.assert_array_equal(
            positions[rows, places], [np.arange(places.stop - places.start)]
        )


def test_bigrams_begin_anew_and_know_no_new_tokens():
    ids, _, firsts = packed()
    for count in (49, 40):
        fast, slow = np.full(ids.shape, -1, np.int32), np.full(ids.shape, -1, np.int32)
        for before in (None, np.array([9, 3, 0], np.int32)):
            compiled.bigrams(fast, ids, 7, count, -1, before, firsts)
            reference.bigrams(slow, ids, 7, count, -1, before, firsts)
            np.testing.assert_array_equal(fast, slow)
            assert fast.min() >= 0 and fast.max() < count
        known = np.where(ids < 7, ids, 0)
        reference.bigrams(slow, known, 7, count, -1, None, firsts)
        compiled.bigrams(fast, ids, 7, count, -1, None, firsts)
        np.testing.assert_array_equal(fast, slow)


@pytest.mark.parametrize(
    ("firsts", "words"),
    [
        (np.zeros((3, 4), np.int32), "in the shape of ids"),
        (np.zeros((3, T), np.float32), "must be whole numbers"),
        (np.full((3, T), -1, np.int32), "none after the token itself"),
        (np.full((3, T), 1, np.int32), "none after the token itself"),
    ],
)
def test_impossible_documents_are_refused(firsts, words):
    model = make("llama")
    ids, targets, _ = packed()
    for call in (model.losses, model.loss_and_gradients):
        with pytest.raises(InputError, match=words):
            call(ids, targets, firsts=firsts)


def test_the_loss_is_that_of_pytorch_with_ignored_targets():
    torch = pytest.importorskip("torch")
    ids, targets, firsts = packed()
    weights = (np.random.default_rng(3).random(ids.shape) < 0.3).astype(np.float32)
    model = make("gpt2")
    logits = []
    for rows, places in alone():
        logits.append(model.forward(np.ascontiguousarray(ids[rows, places]))[0])
    kept = np.where(weights > 0, targets, -100).astype(np.int64)
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(np.concatenate(logits)), torch.tensor(kept.reshape(-1)), ignore_index=-100
    )
    loss = gradients(model, ids, targets, firsts=firsts, weights=weights)[0]
    assert loss == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(("R", "C"), [(1, 1), (9, 17), (40, 64), (33, 7)])
@pytest.mark.parametrize("dtype", [np.float32, FLOAT16, BFLOAT16])
def test_rows_are_taken_and_put_back(R, C, dtype):
    random = np.random.default_rng(R)
    x = round_to(random.standard_normal((R, C)).astype(np.float32), np.dtype(dtype))
    rows = np.sort(random.choice(R, max(1, R // 3), replace=False)).astype(np.int32)
    taken, expected = (np.zeros((len(rows), C), x.dtype) for _ in range(2))
    compiled.take_rows(taken, x, rows)
    reference.take_rows(expected, x, rows)
    np.testing.assert_array_equal(taken, expected)
    put, expected = (np.zeros((R, C), x.dtype) for _ in range(2))
    compiled.put_rows(put, taken, rows)
    reference.put_rows(expected, taken, rows)
    np.testing.assert_array_equal(put, expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.7])
def test_the_head_computes_only_what_is_learned_and_the_same(tied, share, monkeypatch):
    """Compared with the passes of all rows: a target without weight has no part in either."""
    ids, targets, firsts = packed()
    random = np.random.default_rng(7)
    weights = (random.random(ids.shape) * (random.random(ids.shape) < share)).astype(np.float32)
    named = {"firsts": firsts, "weights": weights}
    model = make("gpt2", tie_weights=tied)
    shapes = []
    loss = compiled.cross_entropy

    def watched(losses, *arguments):
        shapes.append(len(losses))
        loss(losses, *arguments)

    monkeypatch.setattr(compiled, "cross_entropy", watched)
    found = gradients(model, ids, targets, **named)
    monkeypatch.setattr(transformer, "MOST_ROWS", 0.0)
    whole = gradients(model, ids, targets, **named)
    few, every = shapes
    assert every == ids.size and np.count_nonzero(weights) <= few <= (share + 0.2) * ids.size
    assert found[0] == pytest.approx(whole[0], rel=1e-6)
    assert differ(found[1], whole[1]) < 1e-6 if share else not found[1].any()
