"""The likelihood of texts under a model, many of them packed into each window.

Texts begin, and are cut, as in lm_eval (https://github.com/EleutherAI/lm-evaluation-harness), so
that a model has the same results here and there.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from smallmind.console import activity
from smallmind.exchange.published import beginning_of
from smallmind.nn.transformer import TransformerModel
from smallmind.text.packing import pack
from smallmind.text.tokenizer import Tokenizer, special_names
from smallmind.writing.decoder import check_tokenizer

WINDOW_TOKENS = 512  # unless a text needs more: longer windows gain nothing
BATCH_TOKENS = 4096


class Scored(NamedTuple):
    """Tokens of which those from `first` on are predicted: int32 (n,), first is at least 1."""

    ids: np.ndarray
    first: int


class Likelihood(NamedTuple):
    """The natural logarithm of a text's probability under a model."""

    value: float
    is_greedy: bool  # each of its tokens is the likeliest one
    is_cut: bool  # the text and its context are longer than the model's


class _Window(NamedTuple):
    """A part of a text that a model sees at once: its inputs are ids[begin : end - 1]."""

    text: int
    begin: int
    end: int
    new: int  # the first token that is predicted here


class Scorer:
    """`Scorer(model, tokenizer)`: finds how likely texts are.

    A text without context is predicted from the token that begins texts: the tokenizer's own, else
    the one that ends them, else the default prompt, a line break. InputError if the tokenizer is
    not the model's.
    """

    def __init__(self, model: TransformerModel, tokenizer: Tokenizer) -> None:
        check_tokenizer(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        found = beginning_of(tokenizer)
        if found is None:
            found = int(tokenizer.encode(tokenizer.opening)[-1])
        self.beginning = found

    @property
    def context(self) -> int:
        """The most tokens from which the model predicts one."""
        return self.model.config.block_size

    def texts(self, texts: Sequence[str]) -> list[Likelihood]:
        """Returns the likelihood of each text, from its first token on."""
        return self.score([self.alone(ids) for ids in self.encode_each(texts)])

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Contexts and continuations -> the likelihood of each continuation after its context."""
        return self.score(self.encode_pairs(pairs))

    def encode_each(self, texts: Sequence[str], begins: bool = False) -> list[np.ndarray]:
        """texts -> ids of each; if it `begins`, after the token that some models want first."""
        tokenizer = self.tokenizer
        is_named = special_names(tuple(tokenizer.special)).search if tokenizer.special else None
        plain = [not (is_named and is_named(text)) for text in texts]
        quickly = iter(tokenizer.encode_each(list(itertools.compress(texts, plain))))
        found = [
            next(quickly) if is_plain else tokenizer.encode(text)
            for text, is_plain in zip(texts, plain, strict=True)
        ]
        return [tokenizer.begun(ids) for ids in found] if begins else found

    def alone(self, ids: np.ndarray) -> Scored:
        """Returns the tokens of a text without context."""
        if ids[:1].tolist() == [self.beginning]:  # it says so itself
            return Scored(ids, 1)
        return Scored(np.insert(ids, 0, self.beginning), 1)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        """Contexts and continuations -> the tokens of both.

        Spaces at the end of a context belong to the continuation, and what is scored are the
        tokens of both together beyond as many as the context has.
        """
        stripped = [context.rstrip() for context, _ in pairs]
        whole = self.encode_each([context + more for context, more in pairs], begins=True)
        contexts = self.encode_each(stripped, begins=True)
        scored = []
        for (context, continuation), both, before in zip(pairs, whole, contexts, strict=True):
            if not context:
                (both,) = self.encode_each([continuation])
                scored.append(self.alone(both))
            elif not len(before):  # a context of spaces
                scored.append(self.alone(both))
            else:
                # At least one token, though the two may have merged at their border.
                scored.append(Scored(both, min(len(before), len(both) - 1)))
        return scored

    def score(self, texts: Sequence[Scored]) -> list[Likelihood]:
        """Returns the likelihood of each, where a text of no predicted token is certain.

        What is longer than the context is cut on the left, as far as all that is predicted fits;
        where it does not, in windows that predict as much as they hold.
        """
        windows = [window for i, text in enumerate(texts) for window in self._windows(i, text)]
        sums, greedy = np.zeros(len(texts)), np.ones(len(texts), np.bool_)
        for window, losses, right in self._passes(texts, windows):
            sums[window.text] -= losses.sum(dtype=np.float64)
            greedy[window.text] &= right.all()
        cut = [len(text.ids) - 1 > self.context for text in texts]
        return [Likelihood(*each) for each in zip(sums.tolist(), greedy.tolist(), cut, strict=True)]

    def _windows(self, number: int, text: Scored) -> Iterator[_Window]:
        T, n = self.context, len(text.ids)
        for new in range(text.first, n, T):
            end = min(new + T, n)
            yield _Window(number, max(0, end - 1 - T), end, new)

    def _passes(
        self, texts: Sequence[Scored], windows: Sequence[_Window]
    ) -> Iterator[tuple[_Window, np.ndarray, np.ndarray]]:
        """Yields the losses of each window's new tokens, and which of them are the likeliest
        ones.
        """
        if not windows:
            return
        lengths = np.array([window.end - window.begin - 1 for window in windows])
        T = min(self.context, max(WINDOW_TOKENS, int(lengths.max())))
        order, ends = pack(lengths, T)
        rows = np.split(order, ends[:-1])
        B = max(1, BATCH_TOKENS // T)
        batches = [rows[i : i + B] for i in range(0, len(rows), B)]
        for batch in activity.parts(batches):
            # Empty positions have token 0, and each is a text of its own.
            shape = len(batch), T
            ids, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            firsts = np.tile(np.arange(T, dtype=np.int32), (len(batch), 1))
            weights = np.zeros(shape, np.float32)
            filled = []
            for row, numbers in enumerate(batch):
                start = 0
                for number in numbers.tolist():
                    window = windows[number]
                    part, end = texts[window.text].ids, start + int(lengths[number])
                    ids[row, start:end] = part[window.begin : window.end - 1]
                    targets[row, start:end] = part[window.begin + 1 : window.end]
                    firsts[row, start:end] = start
                    new = slice(end - (window.end - window.new), end)
                    weights[row, new] = 1
                    filled.append((window, row, new))
                    start = end
            right = np.empty(shape, np.bool_)
            losses = self.model.losses(ids, targets, right, firsts, weights)
            for window, row, new in filled:
                yield window, losses[row, new], right[row, new]


def distinct(texts: Iterable[str]) -> tuple[list[str], list[int]]:
    """texts -> each of them once, and where in that list each is: what repeats is scored once."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(text, len(numbers)) for text in texts]
    return list(numbers), found
