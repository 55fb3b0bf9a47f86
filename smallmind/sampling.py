"""Which token follows, given the logits of all tokens."""

from collections.abc import Iterable

import numpy as np

from smallmind.checks import InputError
from smallmind.config import GenerationConfig


class Seen:
    """The tokens of a text so far, for the penalties: of the prompt, and those written since."""

    def __init__(self, vocab_size: int, prompt: Iterable[int] = ()) -> None:
        self.counts = np.zeros(vocab_size, np.int64)  # of those written
        self.occurs = np.zeros(vocab_size, bool)  # in prompt or text
        self.occurs[np.fromiter(prompt, np.int64)] = True

    def add(self, token: int) -> None:
        """A token has been written."""
        self.counts[token] += 1
        self.occurs[token] = True


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
    x = logits.astype(np.float64)
    if seen:
        _penalise(x, config, seen)
    best = int(np.argmax(x))
    if config.temperature == 0:
        return best
    with np.errstate(over="ignore"):  # a tiny temperature may divide to -inf, as it should
        p = np.exp((x - x[best]) / config.temperature)
    kept = np.arange(len(p))
    if config.top_k is not None and config.top_k < len(p):
        kept = _largest(p, config.top_k)
    if config.top_p is not None and config.top_p < 1:
        order = kept[np.argsort(-p[kept], kind="stable")]
        cumulative = np.cumsum(p[order])
        count = np.searchsorted(cumulative, config.top_p * cumulative[-1]) + 1
        kept = np.sort(order[:count])
    if config.min_p is not None:
        kept = kept[p[kept] >= config.min_p]  # the largest is 1
    cumulative = np.cumsum(p[kept])
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(kept[min(place, len(kept) - 1)])


def _penalise(x: np.ndarray, config: GenerationConfig, seen: Seen) -> None:
    """x (V,) logits -> the same after the penalties. Writes x.

    Those of repetition are of Keskar et al. 2019, the other two as in OpenAI's interface.
    """
    if config.repetition_penalty != 1:
        found = x[seen.occurs]
        factor = np.where(found > 0, 1 / config.repetition_penalty, config.repetition_penalty)
        x[seen.occurs] = found * factor
    if config.presence_penalty:
        x -= config.presence_penalty * (seen.counts > 0)
    if config.frequency_penalty:
        x -= config.frequency_penalty * seen.counts


def _largest(p: np.ndarray, count: int) -> np.ndarray:
    """p (V,) -> the indices of its `count` largest elements, sorted; the first of equal ones."""
    least = np.partition(p, len(p) - count)[len(p) - count]
    above = np.flatnonzero(p > least)
    equal = np.flatnonzero(p == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))
