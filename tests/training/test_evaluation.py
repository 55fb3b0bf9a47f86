"""Evaluations during a run measure the right thing, on the right tokens."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from smallmind import InputError, Tokenizer, Training, TransformerModel
from smallmind.text.tokenizer import Spelled
from smallmind.training import evaluation
from smallmind.training.evaluation import evaluate
from tests.training.small import at_each_pass

TEXT = "the cät sat on the mat. the dög sat on the log. " * 40


def small_training(kind="char", **settings):
    tokenizer = Tokenizer(TEXT, kind)
    model = TransformerModel(tokenizer.vocab_size, 16, 16, 1, 2, seed=1, **settings)
    training = Training(model, tokenizer, TEXT, batch_size=3, seed=1)
    training.train(steps=30, val_every=0, learning_rate=1e-2)
    return training


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_evaluations_use_fixed_windows(kind):
    training = small_training(kind)
    record = training.evaluations.evaluate(30, 4)
    batches = [training.dataset.evaluation_batch("held_out", i) for i in range(4)]
    ids, targets = (np.concatenate(parts) for parts in list(zip(*batches, strict=True))[:2])
    loss = float(training.model.losses(ids, targets).mean(dtype=np.float64))
    assert record.val_loss == pytest.approx(loss, rel=1e-6)
    assert record.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    # Exactly the characters that begin in the tokens predicted.
    predicted = bytes(targets.ravel().tolist())
    starts = targets.size
    if kind == "byte":
        starts = sum(byte & 0xC0 != 0x80 for byte in predicted)
    assert (starts < targets.size) == (kind == "byte")
    expected = loss / math.log(2) * targets.size / starts
    assert record.bits_per_character == pytest.approx(expected, rel=1e-6)
    right = training.model.forward(ids).argmax(axis=-1) == targets
    assert record.accuracy == right.mean() and 0.1 < record.accuracy < 1
    assert (
        training.evaluations.evaluate(31, 4).val_loss == record.val_loss
    )  # always the same windows


def test_zero_batches_evaluate_the_whole_held_out_part():
    training = small_training()
    held_out = training.dataset.held_out
    record = training.evaluations.evaluate(30, 0)
    whole = evaluate(training.model, held_out, batch_size=3)
    assert record.val_loss == whole.loss and whole.tokens == len(held_out) - 1
    assert record.accuracy == whole.accuracy
    assert record.bits_per_character == whole.bits_per_character
    assert record.val_loss != pytest.approx(training.evaluations.evaluate(30, 4).val_loss, rel=1e-4)
    # Windows of the training text, as many as above.
    batches = math.ceil(len(held_out) / (3 * 16))
    assert record.train_loss == training.evaluations.evaluate(30, batches).train_loss


def test_a_whole_text_counts_exactly_the_characters_predicted():
    tokenizer = Tokenizer("", "byte")
    model = TransformerModel(256, 8, 8, 1, 1)
    text = "x" + "日" * 9  # 28 bytes, the first of which is given
    result = evaluate(model, tokenizer.encode(text), tokenizer.spelled)
    assert (result.tokens, result.characters) == (27, 9)


def test_a_stop_ends_the_evaluation_of_the_whole_part_too():
    training, calls = small_training(), []

    def stop(number):
        calls.append(number)
        if number == training.dataset.held_out_batches + 2:
            training.stop()

    at_each_pass(training.model, before=stop, name="losses")
    assert training.evaluations.evaluate(30, 0) is None
    assert calls[-1] == training.dataset.held_out_batches + 2


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_a_token_counts_as_right_if_it_has_the_highest_logit(precision, micro_batch_size):
    model = TransformerModel(11, 16, 16, 1, 2, seed=2)
    model.flat.data *= 10
    model.use_precision(precision)
    model.micro_batch_size = micro_batch_size
    random = np.random.default_rng(0)
    ids = random.integers(0, 11, (5, 16)).astype(np.int32)
    targets = model.forward(ids).argmax(axis=-1).astype(np.int32)
    wrong = random.random((5, 16)) < 0.5
    targets[wrong] = (targets[wrong] + 1) % 11
    correct = np.ones((5, 16), bool)
    losses = model.losses(ids, targets, correct)
    np.testing.assert_array_equal(correct, ~wrong)
    np.testing.assert_array_equal(losses, model.losses(ids, targets))


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.95])
def test_losses_of_weighted_targets_are_those_of_all(share, micro_batch_size):
    model = TransformerModel(11, 16, 16, 2, 2, seed=2)
    model.micro_batch_size = micro_batch_size
    random = np.random.default_rng(0)
    ids, targets = random.integers(0, 11, (2, 5, 16)).astype(np.int32)
    weights = (random.random(ids.shape) < share).astype(np.float32)
    hits, found = np.ones((2, *ids.shape), bool)
    losses = model.losses(ids, targets, hits)
    some = model.losses(ids, targets, found, weights=weights)
    chosen = (weights > 0) | (some != 0)
    np.testing.assert_allclose(some[chosen], losses[chosen], rtol=1e-6)
    np.testing.assert_array_equal(found, hits & chosen)
    assert chosen.all() == (share > 0.5)  # of few, the head computes few rows


class Counting:
    """A model whose loss for a token is the token itself, and which sees how each was predicted."""

    def __init__(self, block_size):
        self.config = SimpleNamespace(block_size=block_size)
        self.seen = []  # of each window, its first token

    def assert_half_a_window_before(self, scored):
        """Each token has that context, but for those at the very start of the text."""
        T, starts = self.config.block_size, np.array(sorted(set(self.seen)))
        for token in scored[scored > T]:
            start = starts[starts <= token - T // 2].max()
            assert T // 2 <= token - start <= T

    def losses(self, ids, targets, right):
        np.testing.assert_array_equal(ids[:, 1:], targets[:, :-1])
        right[:] = targets % 2 == 0
        self.seen += ids[:, 0].tolist()
        return targets.astype(np.float32)


@pytest.mark.parametrize("T", [1, 2, 7, 8])
@pytest.mark.parametrize("n", [2, 3, 8, 9, 40, 41, 100, 1000])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_an_evaluation_of_enough_tokens_is_that_of_all(T, n, batch_size):
    tokens, spells = np.arange(n, dtype=np.int32), Spelled.as_bytes
    model = Counting(T)
    whole = evaluate(model, tokens, spells, batch_size)
    model.assert_half_a_window_before(tokens[1:])
    assert whole.tokens == n - 1 and whole.loss == pytest.approx(n / 2)
    assert whole.correct == (n - 1) // 2
    for most in (n + T, 10 * n):
        assert evaluate(Counting(T), tokens, spells, batch_size, most=most) == whole


@pytest.mark.parametrize("T", [2, 7, 8])
@pytest.mark.parametrize("most", [1, 8, 50, 200, 333, 480, 500, 900])
@pytest.mark.parametrize(("batch_size", "shift"), [(1, 0.0), (4, 0.0), (4, 0.62), (1, 0.99)])
def test_an_evaluation_of_some_tokens_spreads_them_over_the_text(T, most, batch_size, shift):
    n, counted = 1000, []

    def spells(ids):
        counted.append(ids.copy())
        return Spelled.as_bytes(ids)

    model = Counting(T)
    tokens = np.arange(n, dtype=np.int32)
    found = evaluate(model, tokens, spells, batch_size, most=most, shift=shift)
    scored = np.concatenate(counted)
    assert found.tokens == len(scored) == len(set(scored.tolist()))
    assert found.loss == pytest.approx(scored.mean())
    assert found.tokens <= max(most, T // 2) + T and found.tokens >= min(most, n) - 2 * T
    model.assert_half_a_window_before(scored)
    gaps = np.diff(np.concatenate([[0], np.sort(scored), [n]]))
    assert gaps.max() <= n / max(1, most // (T // 2)) + 2 * T


def test_an_evaluation_in_other_units():
    model = Counting(1)
    result = dataclasses.replace(
        evaluate(model, np.arange(9)), loss=math.log(2), tokens=8, characters=4
    )
    assert result.bits_per_character == pytest.approx(2)
    assert result.perplexity == pytest.approx(2)
    assert dataclasses.replace(result, loss=1000.0).perplexity == math.inf
    with pytest.raises(InputError, match="at least 2 tokens; the text has 1"):
        evaluate(model, np.arange(1))


def test_estimates_of_different_numbers_take_different_windows():
    tokens, starts = np.arange(1000, dtype=np.int32), []
    for shift in (0.0, 0.4, 0.8):
        model = Counting(8)
        evaluate(model, tokens, most=100, shift=shift)
        starts.append(set(model.seen))
    assert not (starts[0] & starts[1] or starts[0] & starts[2] or starts[1] & starts[2])


def test_the_held_out_part_of_a_long_text_is_sampled(monkeypatch):
    training = small_training()
    whole = evaluation.evaluate_held_out(training.model, training.dataset)
    assert whole.tokens == len(training.dataset.held_out) - 1
    monkeypatch.setattr(evaluation, "MAX_HELD_OUT", 64)
    some = evaluation.evaluate_held_out(training.model, training.dataset)
    assert 48 <= some.tokens <= 80 and some.loss == pytest.approx(whole.loss, rel=0.3)
    assert (
        training.evaluations.evaluate(30, 0).val_loss
        == evaluate(training.model, training.dataset.held_out, batch_size=3).loss
    )  # all of it where that was asked for


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_an_evaluation_counts_the_text_that_its_tokens_spell(kind):
    training = small_training(kind)
    data = training.dataset
    found = evaluation.evaluate_held_out(training.model, data)
    spelled = data.spelled(data.held_out[1:])
    assert (found.characters, found.bytes) == spelled and found.tokens == len(data.held_out) - 1
    nats = found.loss * found.tokens / math.log(2)
    assert found.bits_per_byte == pytest.approx(nats / spelled.bytes)
    assert found.bits_per_character == pytest.approx(nats / spelled.characters)
    assert spelled.bytes > spelled.characters
