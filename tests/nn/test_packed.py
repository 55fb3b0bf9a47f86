"""Windows of several documents that are given: each computes as if it were alone."""

import numpy as np
import pytest

from smallmind import CheckpointStrategy, Distillation, InputError, Precision, TransformerModel
from smallmind.kernels import compiled, reference
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn import batch
from smallmind.nn.recompute import RecomputePlan
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.dataset import Batch
from smallmind.training.anomaly import detect_anomaly
from tests.architectures import BROUGHT

V, T = 11, 23
ARCHS = {**ARCHITECTURES, **BROUGHT} | {
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


def learned(share):
    """Weights of which about this share is 1, the others 0."""
    return (np.random.default_rng(3).random((len(LENGTHS), T)) < share).astype(np.float32)


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
        (np.full((3, T), -1, np.int32), "must be 0 at the first place"),
        (np.full((3, T), 1, np.int32), "must be 0 at the first place"),
        (np.arange(3 * T).reshape(3, T) // (2 * T + 5), "or, where another document begins"),
        (np.arange(3 * T).reshape(3, T) % T // 4 * 2**32, "or, where another document begins"),
        (np.tile(np.arange(T) * (np.arange(T) == 9), (3, 1)), "or, where another document begins"),
    ],
)
def test_impossible_documents_are_refused(firsts, words):
    model = make("llama")
    ids, targets, _ = packed()
    for call in (model.losses, model.loss_and_gradients):
        with pytest.raises(InputError, match=words):
            call(ids, targets, firsts=firsts)


@pytest.mark.parametrize("micro_batch_size", [None, 1, 2])
def test_loss_and_gradients_are_those_of_pytorch_with_ignored_targets(micro_batch_size):
    torch = pytest.importorskip("torch")
    from smallmind.bench.peers.job import Sizes
    from smallmind.bench.peers.torch_gpt2 import Model
    from smallmind.bench.peers.torch_step import load

    ids, targets, firsts = packed()
    weights = learned(0.3)
    model = make("gpt2")
    model.micro_batch_size = micro_batch_size
    twin = Model(Sizes(len(ids), T, 24, 3, 4, V))
    load(twin, model.parameters)
    places, starts = torch.arange(T), torch.from_numpy(firsts)
    mask = (starts[:, None, :, None] <= places) & (places[:, None] >= places)
    logits = twin.logits(torch.from_numpy(ids), places - starts, mask)
    kept = torch.from_numpy(np.where(weights > 0, targets, -100).reshape(-1).astype(np.int64))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), kept, ignore_index=-100)
    expected.backward()
    loss, _ = gradients(model, ids, targets, firsts=firsts, weights=weights)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in twin.named_parameters():
        wanted, found = parameter.grad.numpy(), model.gradients[name]
        found = found.T if found.ndim == 2 and "embedding" not in name else found
        np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("numpy", "float32"), ("numba", "float32"), ("numba", "float16"), ("numba", "bfloat16")],
)
def test_without_a_learned_target_loss_and_gradients_are_zero(backend, precision):
    ids, targets, firsts = packed()
    weights = np.zeros((len(ids), T), np.float32)
    batch = Batch(ids, targets, np.zeros(len(ids), np.int64), weights, firsts=firsts)
    model = make("everything", backend=backend)
    model.use_precision(Precision(precision))
    teacher = Distillation(make("gpt2", backend=backend))
    for strategy in (CheckpointStrategy.NONE, CheckpointStrategy.EVERY_LAYER):
        model.use_recompute(RecomputePlan.of(strategy, 4, 1))
        assert gradients(model, ids, targets, firsts=firsts, weights=weights)[0] == 0.0
        assert not model.flat.grad.any()
        assert teacher.loss_and_gradients(model, batch, scale=2.0) == 0.0
        assert not model.flat.grad.any()


def test_a_teacher_sees_each_document_alone(monkeypatch):
    ids, targets, firsts = packed()
    weights, starts = learned(0.6), np.zeros(len(ids), np.int64)
    student, teacher = make("llama"), make("positions and pairs")
    teacher.parameters["token_embedding.weight"][...] *= 3
    teacher.flat.refresh()
    distillation = Distillation(teacher, alpha=0.7)
    total = 0.0
    for rows, places in alone():
        own = [np.ascontiguousarray(x[rows, places]) for x in (ids, targets, weights)]
        share = own[0].size / ids.size
        batch = Batch(own[0], own[1], starts[:1], own[2])
        total += share * distillation.loss_and_gradients(student, batch, share)
    expected = student.flat.grad.copy()
    batch = Batch(ids, targets, starts, weights, firsts=firsts)

    def differing():
        student.zero_gradients()
        loss = distillation.loss_and_gradients(student, batch)
        return abs(loss - total), differ(student.flat.grad, expected)

    for student.micro_batch_size in (None, 2):
        assert max(differing()) < 1e-5
    with_logits = teacher.with_logits
    with monkeypatch.context() as patch:  # a teacher that sees whole windows
        patch.setattr(teacher, "with_logits", lambda ids, use, _: with_logits(ids, use))
        assert min(differing()) > 1e-3


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_tokens_that_pad_a_window_change_no_bit(precision):
    model = make("everything")
    model.use_precision(Precision(precision))
    ids, targets, firsts = packed([(9, 7, *[1] * 7)] * 3)
    weights = learned(0.5) * (np.arange(T) < 16)
    found = []
    for padding in (0, 5):
        ids[:, 16:] = targets[:, 16:] = padding
        found.append(gradients(model, ids, targets, firsts=firsts, weights=weights))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_head_alone_is_trained_from_the_learned_targets():
    ids, targets, firsts = packed()
    named = {"firsts": firsts, "weights": learned(0.3)}
    model = make("llama", tie_weights=False)
    expected = gradients(model, ids, targets, **named)[0], model.gradients["head.weight"].copy()
    model.freeze("embedding,blocks.0-2,final_norm")
    loss = gradients(model, ids, targets, **named)[0]
    assert loss == expected[0]
    np.testing.assert_array_equal(model.gradients["head.weight"], expected[1])


def test_a_pool_holds_as_much_for_any_number_of_learned_targets():
    for precision in ("float32", "bfloat16"):
        model = make("everything")
        model.use_precision(Precision(precision))
        model.forget_recorded(after=3)
        model.workspace.pool = pool = TensorPool()
        ids, targets, firsts = packed()
        held = []
        for share in (0.01, 0.2, 0.5, 0.7, 1.0) * 5:  # of the last, all logits are computed
            gradients(model, ids, targets, firsts=firsts, weights=learned(share))
            held.append(pool.statistics().bytes_held)
            assert pool.statistics().bytes_rented == 0
        assert len(set(held)) == 1


def test_anomalies_are_found_in_windows_of_several_documents():
    model = make("positions and pairs")
    ids, targets, firsts = packed()
    named = {"firsts": firsts, "weights": learned(0.3)}
    expected = gradients(model, ids, targets, **named)
    with detect_anomaly(model):
        found = gradients(model, ids, targets, **named)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    model.parameters["final_norm.weight"][3] = np.nan
    with detect_anomaly(model), pytest.raises(FloatingPointError, match="pass of final_norm"):
        gradients(model, ids, targets, **named)


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
    monkeypatch.setattr(batch, "MAX_ROW_SHARE", 0.0)
    whole = gradients(model, ids, targets, **named)
    few, every = shapes
    assert every == ids.size and np.count_nonzero(weights) <= few <= (share + 0.2) * ids.size
    assert found[0] == pytest.approx(whole[0], rel=1e-6)
    assert differ(found[1], whole[1]) < 1e-6 if share else not found[1].any()
