"""Evaluates a model on a text, or some windows of it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.losses.cross_entropy import CrossEntropy
from smallmind.losses.loss import Loss
from smallmind.nn.transformer import TransformerModel
from smallmind.text.dataset import Dataset, Tokens
from smallmind.text.tokenizer import Spelled, Tokenizer
from smallmind.training.records import EvaluationRecord

Spells = Callable[[np.ndarray], Spelled]  # tokens, an array of any shape -> what they spell
# The sums that a batch adds to an evaluation: losses, tokens, characters, bytes, correct.
_Counts = tuple[list[float], int, int, int, int]

GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are spread evenly
MOST_HELD_OUT = 1 << 18  # tokens predicted at the end of a run: the loss to 0.003 nats or so
TEXT = CrossEntropy()  # the loss of a text, whatever a run minimises
EVALUATING = 0.1  # share of the time of a run for evaluations and questions


def evaluating_seconds(training_seconds: float) -> float:
    """Returns the time for evaluations and questions in a run whose steps take so many seconds."""
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


class Batches(NamedTuple):
    """The batches of an evaluation, and what computes the sums of one: on any process."""

    items: Sequence[Any]
    compute: Callable[[Any], _Counts]
    divisor: int | None = None  # of the sum of the losses; None: the number of tokens

    def total(self, parts: Sequence[_Counts]) -> Evaluation:
        """The sums of all batches, in order -> the mean of the losses."""
        losses, total = [loss for part in parts for loss in part[0]], 0.0
        for loss in losses:  # one by one: the sum does not depend on who computed them
            total += loss
        tokens, characters, nbytes, correct = map(sum, list(zip(*parts, strict=True))[1:])
        loss = total / (self.divisor or tokens)
        return Evaluation(loss, tokens, max(1, characters), max(1, nbytes), correct)

    def evaluate(self) -> Evaluation:
        """Computes all of them here."""
        return self.total([self.compute(item) for item in activity.parts(self.items)])


def evaluate(
    model: TransformerModel,
    tokens: Tokens,
    spells: Spells = Spelled.as_bytes,
    batch_size: int = 32,
    most: int | None = None,
    shift: float = 0.0,
) -> Evaluation:
    """Evaluates a model on a text. Arguments and errors as `text_batches`."""
    return text_batches(model, tokens, spells, batch_size, most, shift).evaluate()


def text_batches(
    model: TransformerModel,
    tokens: Tokens,
    spells: Spells,
    batch_size: int,
    most: int | None = None,
    shift: float = 0.0,
) -> Batches:
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

    return Batches(batches, compute)


def count_overlapping(n: int, T: int, most: int | None = None) -> int:
    """-> the number of windows `text_batches` takes for n predictions, or about `most` of them."""
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
    model: TransformerModel, dataset: Dataset, batch_size: int = 32
) -> Evaluation:
    """Evaluates a model on the held-out part of a text: all of it, or about MOST_HELD_OUT."""
    with activity.doing("Evaluating the held-out text", usual=True):
        return held_out_batches(model, dataset, batch_size).evaluate()


def held_out_batches(
    model: TransformerModel, dataset: Dataset, batch_size: int, loss: Loss = TEXT
) -> Batches:
    """Returns the held-out part of a text: all of it, or about MOST_HELD_OUT."""
    if dataset.is_packed:
        most = math.ceil(MOST_HELD_OUT / (dataset.batch_size * dataset.block_size))
        numbers = range(min(most, dataset.held_out_batches))
        return _rows(model, dataset, "held_out", numbers, loss)
    return text_batches(model, dataset.held_out, dataset.spelled, batch_size, MOST_HELD_OUT)


def look_batches(
    model: TransformerModel, dataset: Dataset, batches: int, number: int, loss: Loss = TEXT
) -> Batches:
    """Returns as many batches of what `held_out_batches` evaluates; other ones for each number."""
    if dataset.is_packed:
        numbers = range(number * batches, (number + 1) * batches)
        return _rows(model, dataset, "held_out", numbers, loss)
    B, T = dataset.batch_size, min(dataset.block_size, len(dataset.held_out) - 1)
    most = min(MOST_HELD_OUT, batches * B * max(1, T // 2))
    shift = number * GOLDEN % 1.0
    return text_batches(model, dataset.held_out, Spelled.as_bytes, B, most, shift)


def _rows(
    model: TransformerModel, dataset: Dataset, part: str, numbers: Sequence[int], loss: Loss
) -> Batches:
    """Returns some batches of a part, whose rows have learned tokens."""
    special = list(dataset.tokenizer.special.values()) if dataset.tokenizer else []

    def compute(number: int) -> _Counts:
        found = loss.evaluated(model, dataset.evaluation_batch(part, number))
        # Special tokens are no text.
        spelled = dataset.spelled(found.targets[~np.isin(found.targets, special)])
        return found.losses, found.predictions, spelled.characters, spelled.bytes, found.right

    return Batches(numbers, compute)


def part_batches(
    model: TransformerModel, dataset: Dataset, part: str, batches: int, loss: Loss = TEXT
) -> Batches:
    """`batches` batches of the part "train" or "held_out": the same ones at every step.

    With 0, the whole held-out part, and as many windows of the training part.
    """
    spells, count = dataset.spelled, batches or dataset.held_out_batches
    if dataset.is_packed:
        return _rows(model, dataset, part, range(min(count, dataset.batches_of(part))), loss)
    if part == "held_out" and not batches:
        return text_batches(model, dataset.held_out, spells, dataset.batch_size)

    def compute(number: int) -> _Counts:
        batch = dataset.evaluation_batch(part, number)
        right = np.empty(batch.targets.shape, np.bool_)
        mean = float(model.losses(batch.ids, batch.targets, right).mean(dtype=np.float64))
        spelled, size = spells(batch.targets), batch.targets.size
        return [mean], size, spelled.characters, spelled.bytes, int(right.sum())

    return Batches(range(count), compute, count)


def evaluate_tokens(model: TransformerModel, tokenizer: Tokenizer, tokens: Tokens) -> Evaluation:
    with activity.doing("Evaluating the text", usual=True):
        return evaluate(model, tokens, tokenizer.spelled)


def evaluation_record(step: int, train: Evaluation, held_out: Evaluation) -> EvaluationRecord:
    """Reports the evaluations of both parts after a step."""
    return EvaluationRecord(
        step=step,
        train_loss=train.loss,
        val_loss=held_out.loss,
        perplexity=held_out.perplexity,
        bits_per_character=held_out.bits_per_character,
        bits_per_byte=held_out.bits_per_byte,
        accuracy=held_out.accuracy,
    )
