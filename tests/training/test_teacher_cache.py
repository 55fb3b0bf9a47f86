"""A cache holds what the teacher would compute, and a wrong cache is refused."""

import numpy as np
import pytest

from smallmind import Distillation, InputError
from smallmind.files import safetensors
from smallmind.losses import teacher_cache
from smallmind.losses.distillation import model_digest
from smallmind.losses.teacher_cache import make_cache, top_k_log_probabilities
from smallmind.text.samplers import RandomWindows, draw
from tests.training.test_distillation import TEXT, T, V, new_teacher, new_training, sharp


def losses_and_gradients(training, batches=4, stride=None):
    """The losses of some batches and their gradients, with the teacher or its cache."""
    model, distillation, losses = training.model, training.loss, []
    sampler = RandomWindows(training.data, stride=stride or distillation.stride)
    for number in range(batches):
        losses.append(distillation.loss_and_gradients(model, draw(sampler, number)))
    return np.array(losses), model.flat.grad.copy()


def without_cache(teacher, **settings):
    """The teacher's own logits, on the windows that a cache would have."""
    training = new_training(Distillation(teacher, **settings), dropout=0.0)
    return losses_and_gradients(training, stride=T)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_cache_of_all_tokens_equals_the_teacher_up_to_float16_rounding(tmp_path, temperature):
    teacher, settings = sharp(new_teacher()), {"temperature": temperature, "alpha": 1.0}
    expected, gradient = without_cache(teacher, **settings)
    distillation = Distillation(teacher, cache=tmp_path / "cache", top_k=1000, **settings)
    losses, cached = losses_and_gradients(new_training(distillation, dropout=0.0))
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    assert np.linalg.norm(cached - gradient) <= 2e-3 * np.linalg.norm(gradient)
    assert (losses != expected).any()  # it was read, not computed


def test_the_rest_of_the_probability_is_spread_over_the_other_tokens():
    random = np.random.default_rng(0)
    logits = 3 * random.standard_normal((50, 21))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for k in (1, 5, 20, 21):
        chosen, kept = top_k_log_probabilities(logits, k)
        spread = np.repeat(np.exp(kept[:, -1:]), 21, axis=1)
        np.put_along_axis(spread, chosen, np.exp(kept[:, :-1]), axis=1)
        np.testing.assert_allclose(spread.sum(axis=1), 1, rtol=1e-12)
        np.testing.assert_allclose(np.sort(p)[:, -k:], np.sort(spread)[:, -k:])


def test_a_cache_of_nearly_all_tokens_gives_nearly_the_same_loss(tmp_path):
    teacher = sharp(new_teacher())
    expected, _ = without_cache(teacher)
    errors = []
    for k in (1, V // 2, V - 1):
        distillation = Distillation(teacher, cache=tmp_path / f"{k}", top_k=k)
        losses, _ = losses_and_gradients(new_training(distillation, dropout=0.0))
        errors.append(np.abs(losses / expected - 1).max())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 2e-3


def test_logits_without_probability_are_kept_finite():
    chosen, kept = top_k_log_probabilities(np.array([[0.0, -1e6, -2e6]]), 2)
    assert list(chosen[0]) == [0, 1] and list(kept[0]) == [0, -65504, -65504]


def test_a_cached_window_is_what_the_teacher_computes_for_it(tmp_path):
    teacher = sharp(new_teacher())
    path, digest, data = tmp_path / "cache", model_digest(teacher), new_training(None).data
    make_cache(path, teacher, digest, V, data, tokens_per_pass=3 * T)  # the last pass is shorter
    training = new_training(Distillation(teacher, cache=path, top_k=V))
    dataset, workspace = training.data, training.model.workspace
    last = (len(dataset.train) - T - 1) // T * T
    for start in (0, 7 * T, last):
        expected = teacher.forward(dataset.train[None, start : start + T])[0]
        expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
        with training.loss.cache.logits(np.array([start]), workspace) as logits:
            np.testing.assert_allclose(logits, expected, rtol=6e-4, atol=1e-6)
    sampler = RandomWindows(dataset, stride=training.loss.stride)
    starts = {int(s) for number in range(2000) for s in sampler.starts(number)}
    assert starts == set(range(0, last + 1, T))
    ids, targets, places, *_ = draw(sampler, 5)
    for row, start in enumerate(places):
        np.testing.assert_array_equal(ids[row], dataset.train[start : start + T])
        np.testing.assert_array_equal(targets[row], dataset.train[start + 1 : start + T + 1])


def test_a_cache_is_made_once_and_the_teacher_released(tmp_path, monkeypatch):
    path, teacher = tmp_path / "cache", sharp(new_teacher())
    distillation = Distillation(teacher, cache=path, top_k=3)
    first, _ = losses_and_gradients(new_training(distillation, dropout=0.0))
    assert distillation.teacher is None
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    before = path.read_bytes()
    monkeypatch.setattr(teacher_cache, "make_cache", None)
    monkeypatch.setattr(type(teacher), "with_logits", None)  # neither made nor run again
    again = Distillation(teacher, cache=path, top_k=3)
    second, _ = losses_and_gradients(new_training(again, dropout=0.0))
    np.testing.assert_array_equal(first, second)
    assert path.read_bytes() == before


def test_a_wrong_cache_is_refused(tmp_path):
    path, teacher = tmp_path / "cache", new_teacher()
    new_training(Distillation(teacher, cache=path, top_k=3))
    before = path.read_bytes()

    def refused(message, teacher=teacher, top_k=3, **settings):
        with pytest.raises(InputError, match=message) as error:
            new_training(Distillation(teacher, cache=path, top_k=top_k), **settings)
        assert "\n" not in str(error.value) and str(path) in str(error.value)

    refused("was made for another teacher: .* remove it or name another", new_teacher(seed=2))
    refused("was made for another text", text=TEXT.replace("cat", "tac"))
    refused("was made for another top k", top_k=4)
    assert path.read_bytes() == before
    for place in (len(before) // 2, len(before) - 1):
        damaged = bytearray(before)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        refused("does not match its SHA-256")
    path.write_bytes(before[:-1])
    refused("not a valid safetensors file")
    teacher.save(path)
    refused("is not a cache of a teacher's logits")


def test_tensors_of_other_shapes_are_refused(tmp_path):
    path = tmp_path / "cache"
    new_training(Distillation(new_teacher(), cache=path, top_k=3))
    tensors, metadata = safetensors.read(path)
    safetensors.write(path, {**tensors, "indices": tensors["indices"][:-1]}, metadata)
    with pytest.raises(InputError, match="does not hold what its metadata describes"):
        new_training(Distillation(new_teacher(), cache=path, top_k=3))
    tensors["indices"][:] = V
    safetensors.write(path, tensors, metadata)
    training = new_training(Distillation(new_teacher(), cache=path, top_k=3))
    with pytest.raises(InputError, match="was changed while it was read"):
        losses_and_gradients(training)


def test_a_cache_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.durable.files, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        new_training(Distillation(new_teacher(), cache=tmp_path / "cache", top_k=3))
    assert not list(tmp_path.iterdir())


def test_a_run_with_a_cache_draws_only_its_windows(tmp_path, monkeypatch):
    training = new_training(Distillation(new_teacher(), cache=tmp_path / "cache", top_k=3))
    original, starts = training.loss.loss_and_gradients, []

    def loss_and_gradients(model, batch, *arguments):
        starts.extend(batch.starts)
        return original(model, batch, *arguments)

    monkeypatch.setattr(training.loss, "loss_and_gradients", loss_and_gradients)
    training.train(4, val_every=0)
    training.train(4, epochs=1, val_every=0)
    assert len(starts) > 100 and all(start % T == 0 for start in starts)


def test_both_backends_read_the_same_logits(tmp_path):
    results = []
    for backend in ("numba", "numpy"):
        teacher = sharp(new_teacher(backend=backend))
        distillation = Distillation(teacher, cache=tmp_path / backend, top_k=4)
        training = new_training(distillation, dropout=0.0, backend=backend)
        results.append(losses_and_gradients(training, batches=2)[0])
    np.testing.assert_allclose(*results, rtol=1e-4)
