"""How well a model predicts a text: all of it, or some windows."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from smallmind.config import InputError
from smallmind.nn.transformer import TransformerModel
from smallmind.text.dataset import Batch, Dataset
from smallmind.training.records import EvaluationRecord


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats a token over `tokens` predictions that spell `characters` characters.

    For `correct` of them the token that came was the one that the model thought the likeliest.
    """

    loss: float
    tokens: int
    characters: float
    correct: int

    @property
    def nats_per_character(self) -> float:
        return self.loss * self.tokens / self.characters

    @property
    def bits_per_character(self) -> float:
        return self.nats_per_character / math.log(2)

    @property
    def perplexity(self) -> float:
        """The exponential of the loss: how many equally likely tokens would be as hard to guess."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float:
        return self.correct / self.tokens


def _never() -> None:
    """What evaluations ask before each batch, where nothing can stop them."""


def evaluate_batches(
    model: TransformerModel,
    batches: Iterable[Batch],
    characters_a_token: float,
    before_batch: Callable[[], object] = _never,
) -> Evaluation:
    """ids, targets (B, T), one after another and of one shape -> the mean over all tokens."""
    total, count, tokens, correct = 0.0, 0, 0, 0
    for ids, targets in batches:
        before_batch()
        right = np.empty(targets.shape, np.bool_)
        total += float(model.losses(ids, targets, right).mean(dtype=np.float64))
        correct += int(right.sum())
        tokens, count = tokens + targets.size, count + 1
    return Evaluation(total / count, tokens, tokens * characters_a_token, correct)


def evaluate(
    model: TransformerModel,
    tokens: np.ndarray,
    characters: int,
    batch_size: int = 32,
    before_batch: Callable[[], object] = _never,
) -> Evaluation:
    """tokens (n,) that spell `characters` characters -> the loss of every token after the first.

    Windows overlap by half: a token is predicted from at least block_size / 2 tokens before it,
    except at the very start. InputError for fewer than two tokens.
    """
    n = len(tokens) - 1
    if n < 1:
        raise InputError(f"an evaluation needs at least 2 tokens; the text has {len(tokens)}")
    T = min(model.config.block_size, n)
    stride = max(1, T // 2)
    starts = [*range(0, n - T, stride), n - T]
    total, scored, correct = 0.0, 0, 0
    for first in range(0, len(starts), batch_size):
        before_batch()
        # The last batch is as large as the others: arrays of its own size would take more memory.
        first = max(0, min(first, len(starts) - batch_size))
        places = np.array(starts[first : first + batch_size])
        windows = tokens[places[:, None] + np.arange(T + 1)]
        right = np.empty((len(places), T), np.bool_)
        losses = model.losses(windows[:, :-1], windows[:, 1:], right)
        for start, row, hits in zip(places, losses, right, strict=True):
            total += float(row[scored - start :].sum(dtype=np.float64))
            correct += int(hits[scored - start :].sum())
            scored = max(scored, int(start) + T)
    # The first token is given, not predicted; its share of the characters is left out.
    return Evaluation(total / n, n, max(1, round(characters * n / len(tokens))), correct)


def evaluate_parts(
    step: int,
    model: TransformerModel,
    dataset: Dataset,
    characters_a_token: float,
    batches: int,
    before_batch: Callable[[], object] = _never,
) -> EvaluationRecord:
    """The training and the held-out part, so many batches of each: the same at every step.

    With 0 batches it is all of the held-out part, and as many windows of the training part.
    """

    def some(part: str, count: int) -> Evaluation:
        chosen = (dataset.evaluation_batch(part, i) for i in range(count))
        return evaluate_batches(model, chosen, characters_a_token, before_batch)

    train = some("train", batches or dataset.held_out_batches)
    if batches:
        held_out = some("held_out", batches)
    else:
        characters = round(characters_a_token * len(dataset.held_out))
        held_out = evaluate(model, dataset.held_out, characters, dataset.batch_size, before_batch)
    return EvaluationRecord(
        step=step,
        train_loss=train.loss,
        val_loss=held_out.loss,
        perplexity=held_out.perplexity,
        bits_per_character=held_out.bits_per_character,
        accuracy=held_out.accuracy,
    )
