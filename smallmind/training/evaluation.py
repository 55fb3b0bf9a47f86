"""How well a model predicts a text, all of it."""

import math
from dataclasses import dataclass

import numpy as np

from smallmind.config import InputError
from smallmind.nn.transformer import TransformerModel


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats a token over `tokens` predictions that spell `characters` characters."""

    loss: float
    tokens: int
    characters: int

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


def evaluate(
    model: TransformerModel, tokens: np.ndarray, characters: int, batch_size: int = 32
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
    total, scored = 0.0, 0
    for group in range(0, len(starts), batch_size):
        places = np.array(starts[group : group + batch_size])
        windows = tokens[places[:, None] + np.arange(T + 1)]
        losses = model.losses(windows[:, :-1], windows[:, 1:])
        for start, row in zip(places, losses, strict=True):
            total += float(row[scored - start :].sum(dtype=np.float64))
            scored = int(start) + T
    # The first token is given, not predicted; its share of the characters is left out.
    return Evaluation(total / n, n, max(1, round(characters * n / len(tokens))))
