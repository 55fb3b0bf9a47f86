"""Evaluates a model on a text, or some windows of it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.nn.transformer import TransformerModel
from smallmind.parallel.group import ALONE
from smallmind.text.dataset import Dataset, Tokens
from smallmind.text.tokenizer import Spelled, Tokenizer
from smallmind.training.records import EvaluationRecord

Spells = Callable[[np.ndarray], Spelled]  # tokens, an array of any shape -> what they spell
# Items, and what computes the result of one -> the results of all, in order. May raise Stopped.
Divide = Callable[[Sequence[Any], Callable[[Any], Any]], list[Any]]
# The sums that a batch adds to an evaluation: losses, tokens, characters, bytes, correct.
_Counts = tuple[list[float], int, int, int, int]

GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are spread evenly
MOST_HELD_OUT = 1 << 18  # tokens predicted at the end of a run: the loss to 0.003 nats or so
EVALUATING = 0.1  # share of the time of a run for evaluations and questions


def evaluating_seconds(training_seconds: float) -> float:
    """The time for evaluations and questions in a run whose steps take so many seconds."""
    return EVALUATING / (1 - EVALUATING) * training_seconds


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token over `tokens` predictions.

    `characters` and `bytes` are the UTF-8 length of the evaluated tokens. `correct` counts the
    predictions in which the model ranked the right token first.
    """

    loss: float
    tokens: int
    characters: int
    bytes: int
    correct: int

    @property
    def nats_per_character(self) -> float:
        return self.loss * self.tokens / self.characters

    @property
    def bits_per_character(self) -> float:
        return self.nats_per_character / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8: comparable between tokenizers."""
        return self.loss * self.tokens / self.bytes / math.log(2)

    @property
    def perplexity(self) -> float:
        """Returns exp(loss): as hard to guess as among this many equally likely tokens."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float:
        return self.correct / self.tokens


def _summed(parts: Sequence[_Counts], divisor: int | None = None) -> Evaluation:
    """The counts of batches, in order -> the mean of the losses, by default per token."""
    losses, total = [loss for part in parts for loss in part[0]], 0.0
    for loss in losses:  # one by one: the sum does not depend on who computed them
        total += loss
    tokens, characters, nbytes, correct = map(sum, list(zip(*parts, strict=True))[1:])
    return Evaluation(
        total / (divisor or tokens), tokens, max(1, characters), max(1, nbytes), correct
    )


def evaluate(
    model: TransformerModel,
    tokens: Tokens,
    spells: Spells = Spelled.as_bytes,
    batch_size: int = 32,
    most: int | None = None,
    divide: Divide = ALONE.divide,
    shift: float = 0.0,
) -> Evaluation:
    """tokens (n,) -> the mean over all of them but the first, which is given, not predicted.

    Windows overlap by half: every token is predicted from at least block_size / 2 tokens before
    it, except at the very start. With `most`, about as many predictions at most, spread evenly;
    `shift`, below 1, chooses other windows, by as much of the space between two.
    InputError for fewer than two tokens.
    """
    n = len(tokens) - 1
    if n < 1:
        raise InputError(f"an evaluation needs at least 2 tokens; the text has {len(tokens)}")
    T = min(model.config.block_size, n)
    batches = list(_overlapping(n, T, batch_size, most, shift))

    def compute(windows: list[tuple[int, slice]]) -> _Counts:
        rows = np.stack([tokens[start : start + T + 1] for start, _ in windows])
        targets = rows[:, 1:]
        right = np.empty(targets.shape, np.bool_)
        losses, counted, characters, nbytes, correct = [], 0, 0, 0, 0
        rows_of_losses = model.losses(rows[:, :-1], targets, right)
        for (_, new), row, ids, hits in zip(windows, rows_of_losses, targets, right, strict=True):
            losses.append(float(row[new].sum(dtype=np.float64)))
            correct += int(hits[new].sum())
            spelled = spells(ids[new])
            characters, nbytes = characters + spelled.characters, nbytes + spelled.bytes
            counted += len(row[new])
        return losses, counted, characters, nbytes, correct

    return _summed(divide(batches, compute))


def count_overlapping(n: int, T: int, most: int | None = None) -> int:
    """The number of windows `evaluate` takes for n predictions, or about `most` of them."""
    T = min(T, n)
    stride = max(1, T // 2)
    in_all = math.ceil((n - T) / stride) + 1
    return in_all if most is None else min(in_all, max(1, most // stride))


def _overlapping(
    n: int, T: int, batch_size: int, most: int | None, shift: float
) -> Iterator[list[tuple[int, slice]]]:
    """Batches of windows of T of n tokens: where each begins, and its targets that are new."""
    stride = max(1, T // 2)
    windows_in_all = math.ceil((n - T) / stride) + 1
    count = count_overlapping(n, T, most)
    skipped = int(shift * (windows_in_all // count))
    scored = 0
    for first in range(0, count, batch_size):
        # The last batch is as large as the others: arrays of its own size would take more memory.
        first = max(0, min(first, count - batch_size))
        windows = []
        for i in range(first, min(first + batch_size, count)):
            start = min((i * windows_in_all // count + skipped) * stride, n - T)
            windows.append((start, slice(max(scored - start, T - stride) if start else 0, None)))
            scored = max(scored, start + T)
        yield windows


def evaluate_held_out(
    model: TransformerModel,
    dataset: Dataset,
    batch_size: int = 32,
    divide: Divide = ALONE.divide,
) -> Evaluation:
    """Evaluates a model on the held-out part of a text: all of it, or about MOST_HELD_OUT."""
    spells = dataset.spelled
    with activity.doing("Evaluating the held-out text", usual=True):
        if dataset.is_packed:
            most = math.ceil(MOST_HELD_OUT / (dataset.batch_size * dataset.block_size))
            count = min(most, dataset.held_out_batches)
            return _evaluate_batches(model, dataset, "held_out", range(count), divide)
        return evaluate(model, dataset.held_out, spells, batch_size, MOST_HELD_OUT, divide)


def held_out_loss(
    model: TransformerModel,
    dataset: Dataset,
    batches: int,
    number: int,
    divide: Divide = ALONE.divide,
) -> float:
    """The loss of `evaluate_held_out`, estimated on this many batches of its windows.

    Estimates of different numbers take different windows.
    """
    if dataset.is_packed:
        numbers = range(number * batches, (number + 1) * batches)
        return _evaluate_batches(model, dataset, "held_out", numbers, divide).loss
    B, T = dataset.batch_size, min(dataset.block_size, len(dataset.held_out) - 1)
    most = min(MOST_HELD_OUT, batches * B * max(1, T // 2))
    shift = number * GOLDEN % 1.0
    return evaluate(model, dataset.held_out, Spelled.as_bytes, B, most, divide, shift).loss


def _evaluate_batches(
    model: TransformerModel, dataset: Dataset, part: str, numbers: Sequence[int], divide: Divide
) -> Evaluation:
    """The mean over the learned tokens of some batches of packed conversations."""
    special = list(dataset.tokenizer.special.values()) if dataset.tokenizer else []

    def compute(number: int) -> _Counts:
        batch = dataset.evaluation_batch(part, number)
        assert batch.weights is not None
        right = np.empty(batch.targets.shape, np.bool_)
        losses = model.losses(batch.ids, batch.targets, right, batch.firsts)
        learned = batch.weights > 0
        sums = [
            float(row[is_learned].sum(dtype=np.float64))
            for row, is_learned in zip(losses, learned, strict=True)
        ]
        targets = batch.targets[learned]
        spelled = dataset.spelled(targets[~np.isin(targets, special)])  # the others are no text
        correct = int(right[learned].sum())
        return sums, int(learned.sum()), spelled.characters, spelled.bytes, correct

    return _summed(divide(numbers, compute))


def evaluate_tokens(model: TransformerModel, tokenizer: Tokenizer, tokens: Tokens) -> Evaluation:
    with activity.doing("Evaluating the text", usual=True):
        return evaluate(model, tokens, tokenizer.spelled)


def evaluate_parts(
    step: int,
    model: TransformerModel,
    dataset: Dataset,
    batches: int,
    divide: Divide = ALONE.divide,
) -> EvaluationRecord:
    """`batches` batches of the training and of the held-out part: the same ones at every step.

    With 0, the whole held-out part and as many windows of the training part.
    """

    def evaluate_part(part: str) -> Evaluation:
        spells, count = dataset.spelled, batches or dataset.held_out_batches
        if dataset.is_packed:
            numbers = range(min(count, dataset.batches_of(part)))
            return _evaluate_batches(model, dataset, part, numbers, divide)
        if part == "held_out" and not batches:
            return evaluate(model, dataset.held_out, spells, dataset.batch_size, divide=divide)

        def compute(number: int) -> _Counts:
            batch = dataset.evaluation_batch(part, number)
            right = np.empty(batch.targets.shape, np.bool_)
            loss = float(model.losses(batch.ids, batch.targets, right).mean(dtype=np.float64))
            spelled, size = spells(batch.targets), batch.targets.size
            return [loss], size, spelled.characters, spelled.bytes, int(right.sum())

        return _summed(divide(range(count), compute), count)

    train, held_out = map(evaluate_part, activity.parts(("train", "held_out")))
    return EvaluationRecord(
        step=step,
        train_loss=train.loss,
        val_loss=held_out.loss,
        perplexity=held_out.perplexity,
        bits_per_character=held_out.bits_per_character,
        bits_per_byte=held_out.bits_per_byte,
        accuracy=held_out.accuracy,
    )
