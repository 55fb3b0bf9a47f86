"""Which token follows, given the logits of all tokens."""

from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.settings.config import GenerationConfig

DRAWN_TOGETHER = 512  # tokens of which one is drawn at a time
NARROW_CHOICE = 8  # tokens of which one is allowed: then those that are get copied
BELOW_1 = 1 - 2**-53  # the largest number below 1
# In float32, only the likeliest token is left from here on.
MIN_TEMPERATURE = 1e-30


class SeenTokens:
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


class Drawing(NamedTuple):
    """How the next token of a text is chosen; `uniform` in [0, 1) is the number drawn for it."""

    config: GenerationConfig
    uniform: float
    seen: SeenTokens | None = None
    allowed: np.ndarray | None = None  # bool (V,), True for the only tokens; None: all


def choose_each(logits: np.ndarray, drawings: Sequence[Drawing]) -> list[int]:
    """logits (B, V) -> the sampled token of each row.

    In the order of Hugging Face's transformers: penalties, temperature, top_k, top_p, which is a
    share of what top_k leaves, min_p. Equally likely tokens come in the order of their numbers.
    InputError for logits that are not finite.
    """
    # Methods: of few numbers, NumPy's functions take most of their time before they call these.
    if not (isfinite(logits.max()) and isfinite(logits.min())):
        raise InputError("the model's logits are not finite: its weights are too large or damaged")
    x = _penalised(logits, drawings)
    if any(drawing.allowed is not None for drawing in drawings):
        return [_chosen_allowed(*each) for each in zip(x, drawings, strict=True)]
    return _chosen(x, drawings)


def _chosen_allowed(row: np.ndarray, drawing: Drawing) -> int:
    """row (V,), logits after the penalties -> the sampled token, one of those allowed."""
    if drawing.allowed is None:
        return _chosen(row[None], [drawing])[0]
    if np.count_nonzero(drawing.allowed) * NARROW_CHOICE < len(row):
        tokens = np.flatnonzero(drawing.allowed)
        return int(tokens[_chosen(row[None, tokens], [drawing])[0]])
    return _chosen(np.where(drawing.allowed, row, np.float32(-np.inf))[None], [drawing])[0]


def _chosen(x: np.ndarray, drawings: Sequence[Drawing]) -> list[int]:
    """x (B, V), logits after the penalties -> the sampled index of each row."""
    temperatures = [drawing.config.temperature for drawing in drawings]
    if not any(temperatures):
        return list(map(int, x.argmax(1)))
    divisors = [[max(temperature, MIN_TEMPERATURE)] for temperature in temperatures]
    with np.errstate(over="ignore"):  # a low temperature may divide to -inf, as it should
        p = x - x.max(1, keepdims=True)
        p /= np.array(divisors, np.float32)
    np.exp(p, out=p)
    return [
        _draw(likelihoods, drawing.config, drawing.uniform)
        if drawing.config.temperature
        else int(row.argmax())
        for row, likelihoods, drawing in zip(x, p, drawings, strict=True)
    ]


def _penalised(logits: np.ndarray, drawings: Sequence[Drawing]) -> np.ndarray:
    """logits (B, V) -> the same after the penalties.

    Those of repetition are of Keskar et al. 2019, the other two as in OpenAI's interface.
    """
    x = logits
    for row, (config, _, seen, _) in enumerate(drawings):
        penalties = config.repetition_penalty - 1, config.presence_penalty, config.frequency_penalty
        if seen is None or not any(penalties):
            continue
        if x is logits:
            x = logits.copy()
        if config.repetition_penalty != 1:
            found = x[row, seen.occurs]
            factor = np.where(found > 0, 1 / config.repetition_penalty, config.repetition_penalty)
            x[row, seen.occurs] = found * factor
        if config.presence_penalty:
            x[row] -= config.presence_penalty * (seen.counts > 0)
        if config.frequency_penalty:
            x[row] -= config.frequency_penalty * seen.counts
    return x


def _draw(p: np.ndarray, config: GenerationConfig, uniform: float) -> int:
    """p (V,), in proportion to probabilities -> one of those tokens that the settings leave."""
    if config.top_k is config.top_p is config.min_p is None:
        return _drawn(p, uniform)
    tokens = np.arange(len(p))  # those that p is of
    cuts: list[tuple[Callable[..., np.ndarray], float | None]]
    cuts = [(_largest, config.top_k), (_nucleus, config.top_p), (_likely, config.min_p)]
    for cut, setting in cuts:
        if setting is not None:
            left = cut(p, setting)
            tokens, p = tokens[left], p[left]
    return int(tokens[_drawn(p, uniform)])


def _drawn(p: np.ndarray, uniform: float) -> int:
    """p (N,), in proportion to probabilities, uniform in [0, 1) -> the index drawn by it."""
    if len(p) <= DRAWN_TOGETHER:
        cumulative = p.cumsum(dtype=np.float64)
        index = cumulative.searchsorted(uniform * cumulative.item(-1), "right")
        return min(int(index), len(p) - 1)
    # Each sum of `cumsum` waits for the one before: of many, first a part is drawn.
    parts = np.add.reduceat(p, np.arange(0, len(p), DRAWN_TOGETHER), dtype=np.float64)
    cumulative = parts.cumsum()
    part = _drawn(parts, uniform)
    rest = uniform * cumulative[-1] - (cumulative[part] - parts[part])
    begin = part * DRAWN_TOGETHER
    return begin + _drawn(
        p[begin : begin + DRAWN_TOGETHER], min(max(rest / parts[part], 0.0), BELOW_1)
    )


# p (N,), in proportion to probabilities, the largest 1 -> the sorted indices of those that stay.


def _largest(p: np.ndarray, count: int) -> np.ndarray:
    """Returns the `count` largest; the first of equal ones."""
    if count >= len(p):
        return np.arange(len(p))
    least = np.partition(p, len(p) - count)[len(p) - count]
    above = np.flatnonzero(p > least)
    equal = np.flatnonzero(p == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(p: np.ndarray, share: float) -> np.ndarray:
    """Returns as few of the largest as have this share of the sum (Holtzman et al. 2020)."""
    total = p.sum(dtype=np.float64)
    # All smaller ones together have less than the rest of the sum: only these need sorting.
    candidates = np.flatnonzero(p >= (1 - share) * total / len(p))
    order = candidates[np.argsort(-p[candidates], kind="stable")]
    cumulative = np.cumsum(p[order], dtype=np.float64)
    return np.sort(order[: np.searchsorted(cumulative, share * total) + 1])


def _likely(p: np.ndarray, least: float) -> np.ndarray:
    """Returns the tokens with at least this probability relative to the likeliest."""
    return np.flatnonzero(p >= least)
