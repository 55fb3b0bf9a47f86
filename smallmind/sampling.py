"""Which token follows, given the logits of all tokens."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.settings.config import GenerationConfig

LOWEST = 1e-30  # the temperature from which on only the likeliest token is left, in float32


class Seen:
    """The tokens of a text so far, for the penalties: of the prompt, and those written since."""

    def __init__(self, vocab_size: int, prompt: Iterable[int] = ()) -> None:
        self.counts = np.zeros(vocab_size, np.int64)  # of those written
        self.occurs = np.zeros(vocab_size, bool)  # in prompt or text
        self.occurs[np.fromiter(prompt, np.int64)] = True

    def add(self, token: int) -> None:
        self.counts[token] += 1
        self.occurs[token] = True


class Alternatives(NamedTuple):
    """The probabilities from which a token was chosen, before penalties and temperature."""

    logprob: float  # of the token: the logarithm of its probability
    entropy: float  # of the choice, in nats
    tokens: np.ndarray  # the likeliest, int64
    logprobs: np.ndarray  # and the logarithms of their probabilities, float32


def alternatives(logits: np.ndarray, token: int, count: int) -> Alternatives:
    """logits (V,) -> the probability of a token, and the `count` likeliest of all."""
    shifted = np.maximum(logits - logits.max(), -1000)  # what is less likely counts nothing
    p = np.exp(shifted)
    total = p.sum(dtype=np.float64)
    logprobs = shifted - np.float32(np.log(total))
    entropy = float(np.log(total) - np.dot(p, shifted) / total)
    likeliest = _largest(p, count) if count else np.empty(0, np.int64)
    likeliest = likeliest[np.argsort(-p[likeliest], kind="stable")]
    return Alternatives(float(logprobs[token]), entropy, likeliest, logprobs[likeliest])


def choose(
    logits: np.ndarray, config: GenerationConfig, uniform: float, seen: Seen | None = None
) -> int:
    """logits (V,), uniform in [0, 1) -> the sampled token.

    In the order of Hugging Face's transformers: penalties, temperature, top_k, top_p, which is a
    share of what top_k leaves, min_p. Equally likely tokens come in the order of their numbers.
    InputError for logits that are not finite.
    """
    if not np.isfinite(logits).all():
        raise InputError("the model's logits are not finite: its weights are too large or damaged")
    x = _penalised(logits, config, seen) if seen else logits
    best = int(np.argmax(x))
    if config.temperature == 0:
        return best
    with np.errstate(over="ignore"):  # a low temperature may divide to -inf, as it should
        p = np.exp((x - x[best]) / max(config.temperature, LOWEST))
    tokens = None  # those that p is of; None: all
    cuts: list[tuple[Callable[..., np.ndarray], float | None]]
    cuts = [(_largest, config.top_k), (_nucleus, config.top_p), (_likely, config.min_p)]
    for cut, setting in cuts:
        if setting is not None:
            kept = cut(p, setting)
            tokens, p = kept if tokens is None else tokens[kept], p[kept]
    cumulative = np.cumsum(p, dtype=np.float64)
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    place = min(place, len(p) - 1)
    return place if tokens is None else int(tokens[place])


def _penalised(logits: np.ndarray, config: GenerationConfig, seen: Seen) -> np.ndarray:
    """logits (V,) -> the same after the penalties.

    Those of repetition are of Keskar et al. 2019, the other two as in OpenAI's interface.
    """
    penalties = config.repetition_penalty - 1, config.presence_penalty, config.frequency_penalty
    if not any(penalties):
        return logits
    x = logits.copy()
    if config.repetition_penalty != 1:
        found = x[seen.occurs]
        factor = np.where(found > 0, 1 / config.repetition_penalty, config.repetition_penalty)
        x[seen.occurs] = found * factor
    if config.presence_penalty:
        x -= config.presence_penalty * (seen.counts > 0)
    if config.frequency_penalty:
        x -= config.frequency_penalty * seen.counts
    return x


# p (N,), in proportion to probabilities, the largest 1 -> the sorted indices of those that stay.


def _largest(p: np.ndarray, count: int) -> np.ndarray:
    """The `count` largest; the first of equal ones."""
    if count >= len(p):
        return np.arange(len(p))
    least = np.partition(p, len(p) - count)[len(p) - count]
    above = np.flatnonzero(p > least)
    equal = np.flatnonzero(p == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(p: np.ndarray, share: float) -> np.ndarray:
    """As few of the largest as have this share of the sum (Holtzman et al. 2020)."""
    total = p.sum(dtype=np.float64)
    # All smaller ones together have less than the rest of the sum: only these need sorting.
    candidates = np.flatnonzero(p >= (1 - share) * total / len(p))
    order = candidates[np.argsort(-p[candidates], kind="stable")]
    cumulative = np.cumsum(p[order], dtype=np.float64)
    return np.sort(order[: np.searchsorted(cumulative, share * total) + 1])


def _likely(p: np.ndarray, least: float) -> np.ndarray:
    """The tokens with at least this probability relative to the likeliest."""
    return np.flatnonzero(p >= least)
