"""The tokens of a text, and windows of them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from smallmind.checks import InputError, check_field, check_type
from smallmind.console import activity
from smallmind.randomness import hash64_each
from smallmind.settings.config import ModelConfig, RunConfig
from smallmind.text.tokenizer import Spelled, Tokenizer

WINDOWS_PER_COPY = 64  # windows at a time: copies take memory
HELD_OUT = 0.1  # share of a text, at its end, that is never trained on
MAX_CACHED_BYTES = 4 * 2**20  # of windows for evaluations, not read from disk each time


class Tokens(Protocol):
    """Tokens that are sliced like an array (n,) of int32: in memory, or in files."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> np.ndarray: ...


class Batch(NamedTuple):
    """Windows of a sequence of tokens, and the token that follows each of their tokens."""

    ids: np.ndarray  # int32 (B, T)
    targets: np.ndarray  # int32 (B, T)
    starts: np.ndarray  # (B,), where in the sequence each window begins
    weights: np.ndarray | None = None  # float32 (B, T), of each target; None: all count the same
    first_window: int = 0  # its place in the batch that it is a part of
    firsts: np.ndarray | None = None  # int32 (B, T), where the document of each token begins

    def part(self, rows: slice) -> "Batch":
        """Returns some of its windows."""
        first = self.first_window + rows.indices(len(self.ids))[0]
        return self._each(lambda array: array[rows])._replace(first_window=first)

    def _each(self, change: Callable[[np.ndarray], np.ndarray]) -> "Batch":
        changed: Any = (change(x) if isinstance(x, np.ndarray) else x for x in self)
        return Batch(*changed)

    @property
    def first_row(self) -> int:
        """The place of its first token in the batch that it is a part of."""
        return self.first_window * self.ids.shape[1]

    @property
    def weighting(self) -> dict[str, Any]:
        """The arguments of a pass that weighs the targets, as a part of an update.

        The weight of the whole update is known when all its batches are drawn.
        """
        arguments: dict[str, Any] = {}
        if self.weights is not None:
            arguments |= {"weights": self.weights, "divisor": self.ids.size}
        if self.firsts is not None:
            arguments["firsts"] = self.firsts
        return arguments

    @property
    def windows(self) -> float:
        """How many windows its targets weigh as much as, if all of a window's weigh 1."""
        if self.weights is None:
            return len(self.ids)
        return float(self.weights.sum(dtype=np.float64)) / self.ids.shape[1]

    def copy(self) -> "Batch":
        """Returns its windows in arrays of their own."""
        return self._each(lambda array: array.copy())


class Question(NamedTuple):
    """A question to the assistant in a conversation, and its answer there."""

    ids: np.ndarray  # int32 (n,), the conversation up to where the answer begins
    asked: np.ndarray  # its last part: the turn before the answer
    answer: np.ndarray  # int32 (m,), with the token that ends it


class Dataset:
    """The tokens of a text, and windows of either part: the last `held_out` tokens are held out.

    By default that is a tenth of them. `held_out` may also be a part of its own, after `tokens`,
    which is then all to train on: both are read only as far as windows are taken from them.
    `batch_size` windows of `block_size` tokens make a batch. Samplers choose which windows to train
    on, by `seed`; evaluations always use the same ones. InputError if the text is too short.

    `weights`, float32, one for each token of the training part, is how much predicting that token
    counts in training; None: all count the same.
    """

    weights: np.ndarray | None = None
    window_weights: np.ndarray | None = None  # of the windows of an epoch; None: all count the same
    is_packed = False  # its windows hold several documents, which their batches tell apart
    stride = 1  # windows may begin at its multiples
    sequences = 1  # side by side in a window, for a loss that compares them

    def __init__(
        self,
        tokens: Tokens,
        block_size: int,
        batch_size: int,
        seed: int,
        tokenizer: Tokenizer | None = None,
        held_out: int | Tokens | None = None,
    ) -> None:
        if held_out is None or isinstance(held_out, int):
            check_type("tokens", tokens, np.ndarray)
            count = int(len(tokens) * HELD_OUT) if held_out is None else held_out
            start = len(tokens) - count
            tokens, held_out = tokens[:start], tokens[start:]
        block_size = check_field(ModelConfig, "block_size", block_size)
        self.train, self.held_out = tokens, held_out
        if len(tokens) <= block_size or len(held_out) < 2:
            needed, count = max(20, block_size + 1 + block_size // 9), len(tokens) + len(held_out)
            if count < 20:
                raise InputError(f"a text needs at least 20 tokens; this one has {count}")
            raise InputError(
                f"block_size={block_size} needs at least {needed} tokens, a tenth of them held "
                f"out; the text has {count}: give a longer text or a smaller block_size"
            )
        self.block_size = block_size
        self.batch_size = check_field(RunConfig, "batch_size", batch_size)
        self.seed = check_field(RunConfig, "seed", seed)
        self.tokenizer = tokenizer
        self._cached: dict[tuple[str, int], Batch] = {}

    def __repr__(self) -> str:
        return (
            f"<Dataset: {len(self.train):,} training and {len(self.held_out):,} held-out tokens, "
            f"batches of {self.batch_size} x {self.block_size}>"
        )

    @classmethod
    def from_text(
        cls,
        text: str,
        tokenizer: Tokenizer,
        block_size: int,
        batch_size: int = RunConfig.batch_size,
        seed: int = RunConfig.seed,
        held_out: int | None = None,
    ) -> "Dataset":
        """-> the dataset of a text. Its last `held_out` characters are held out; None: a tenth."""
        check_type("text", text, str)
        check_type("tokenizer", tokenizer, Tokenizer)
        with activity.doing("Encoding the text", usual=len(text) < activity.LARGE):
            if held_out is None:
                ids = tokenizer.encode_documents(text)
                return cls(ids, block_size, batch_size, seed, tokenizer)
            start = len(text) - held_out
            parts = [tokenizer.encode_documents(part) for part in (text[:start], text[start:])]
        tokens, count = np.concatenate(parts), len(parts[1])
        return cls(tokens, block_size, batch_size, seed, tokenizer, count)

    def windows(self, starts: np.ndarray, out: Batch | None = None) -> Batch:
        """Windows of the training part that begin at starts (B,), in the first rows of `out`."""
        batch = _windows(self.train, self.block_size, starts, out)
        if self.weights is None:
            return batch
        weights = np.empty(batch.ids.shape, np.float32) if out is None else out.weights
        assert weights is not None
        weights = weights[: len(starts)]
        for row, start in enumerate(starts):
            weights[row] = self.weights[start + 1 : start + 1 + self.block_size]
        return batch._replace(weights=weights)

    def questions(self, most: int, longest: int) -> "list[Question]":
        """Returns held-out questions, evenly, with answers of at most `longest` if any."""
        del most, longest
        return []  # of a text

    def as_written(self) -> "Dataset":
        """Returns the texts that a model would write: without answers that are to be avoided."""
        return self

    @property
    def is_weighted(self) -> bool:
        """True if its batches have weights."""
        return self.weights is not None

    def as_text(self) -> "Dataset":
        """Windows anywhere in the training part, without weights."""
        return self

    @property
    def learned_share(self) -> float:
        """The share of the targets in its windows that count in training."""
        return 1.0

    @property
    def stored(self) -> tuple[Tokens, Tokens]:
        """Both parts as they are given to the constructor."""
        return self.train, self.held_out

    @property
    def tokens_in_memory(self) -> int:
        """The number of its tokens, of both parts."""
        return len(self.train) + len(self.held_out)

    @property
    def is_on_disk(self) -> bool:
        """True if windows are read from files when they are needed."""
        return not isinstance(self.stored[0], np.ndarray)

    @property
    def evaluated_tokens(self) -> int:
        """The number of tokens in a batch of an evaluation."""
        return self.batch_size * self.block_size

    @property
    def held_out_batches(self) -> int:
        """The number of batches with as many tokens as the held-out part."""
        return self.batches_of("held_out")

    def batches_of(self, part: str) -> int:
        """Returns the number of batches with as many tokens as the part "train" or "held_out"."""
        tokens = self.train if part == "train" else self.held_out
        return math.ceil(len(tokens) / (self.batch_size * self.block_size))

    def spelled(self, tokens: np.ndarray) -> Spelled:
        """Returns the text length of tokens; without a tokenizer, a character of one byte each."""
        return self.tokenizer.spelled(tokens) if self.tokenizer else Spelled.as_bytes(tokens)

    def evaluation_batch(self, part: str, number: int) -> Batch:
        """-> batch `number` of the part "train" or "held_out": the same in every evaluation."""
        tokens, stream = (self.train, 2) if part == "train" else (self.held_out, 1)
        # A held-out part shorter than a window is still evaluated, in shorter windows.
        T = min(self.block_size, len(tokens) - 1)
        starts = random_starts((self.seed, stream, number), self.batch_size, len(tokens) - T)
        batch = self._cached.get((part, number)) or _windows(tokens, T, starts, None)
        nbytes = batch.ids.nbytes + batch.targets.nbytes
        if self.is_on_disk and len(self._cached) < MAX_CACHED_BYTES // nbytes:
            self._cached[part, number] = batch
        return batch


def random_starts(key: tuple[int, ...], count: int, limit: int, stride: int = 1) -> np.ndarray:
    """Draws `count` multiples of stride below limit, determined by key."""
    choices = (limit - 1) // stride + 1
    hashes = hash64_each(key, np.arange(count))
    return (hashes % np.uint64(choices)).astype(np.int64) * stride


def _windows(tokens: Tokens, T: int, starts: np.ndarray, out: Batch | None) -> Batch:
    if out is None:
        shape = (len(starts), T)
        out = Batch(np.empty(shape, np.int32), np.empty(shape, np.int32), starts)
    ids, targets = out.ids[: len(starts)], out.targets[: len(starts)]
    if isinstance(tokens, np.ndarray) and tokens.strides == (tokens.itemsize,):
        # All windows as overlapping rows, without copying anything.
        shape = len(tokens) - T, T + 1
        windows = np.ndarray(shape, tokens.dtype, tokens, strides=2 * tokens.strides)
        for first in range(0, len(starts), WINDOWS_PER_COPY):
            rows = slice(first, first + WINDOWS_PER_COPY)
            copies = windows[starts[rows]]
            ids[rows], targets[rows] = copies[:, :-1], copies[:, 1:]
        return Batch(ids, targets, starts)
    for row, start in enumerate(starts):
        window = tokens[start : start + T + 1]
        ids[row], targets[row] = window[:-1], window[1:]
    return Batch(ids, targets, starts)
