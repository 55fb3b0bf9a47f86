"""Conversations as batches: whole ones packed into windows, attention and loss inside each."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_field
from smallmind.console import activity
from smallmind.randomness import hash64, hash_words
from smallmind.settings.config import ModelConfig, RunConfig
from smallmind.text.chat import CUT, LEARNED, MARK_KINDS, START
from smallmind.text.dataset import Batch, Dataset, Question, Tokens
from smallmind.text.packing import pack, pack_evenly
from smallmind.text.tokenizer import Tokenizer

CHUNK = 1 << 22  # tokens that are read at once


class Pieces(NamedTuple):
    """Conversations cut to windows of T: where each piece begins, and its tokens."""

    begins: np.ndarray  # int64 (n,)
    lengths: np.ndarray  # int64 (n,), 2 to T + 1
    learned: np.ndarray  # int64 (n,), of the tokens after the first
    divided: int  # conversations that were longer than a window, and were cut at a turn
    cut_short: int  # turns that were longer than a window: what is beyond it is lost
    left_out: int  # conversations without a token to learn


class PackedDataset(Dataset):
    """Rows of `block_size` tokens, each with whole conversations, as many as fit.

    `train` and `held_out` are given as marked tokens (`text.chat`), in memory or in files. A
    conversation of n tokens takes n - 1 places: each but the last is an input, each but the first a
    target. The loss is on the targets that are learned, or with learn="all" on all of them. Rows
    have about the same number of these if they are packed `evenly`.

    To samplers the training part is `train`, rows of block_size tokens one after another: they
    take windows at multiples of `stride`. InputError if there is nothing to learn.
    """

    is_packed = is_weighted = True
    train: "PackedRows"
    held_out: "PackedRows"
    tokenizer: Tokenizer

    def __init__(
        self,
        train: Tokens,
        held_out: Tokens,
        block_size: int,
        batch_size: int,
        seed: int,
        tokenizer: Tokenizer,
        learn: str = RunConfig.learn,
        evenly: bool = True,
    ) -> None:
        self.block_size = self.stride = check_field(ModelConfig, "block_size", block_size)
        self.batch_size = check_field(RunConfig, "batch_size", batch_size)
        self.seed = check_field(RunConfig, "seed", seed)
        self.learn = check_field(RunConfig, "learn", learn)
        self.tokenizer = tokenizer
        self._stored = train, held_out
        self.train, self.held_out = (
            PackedRows(part, self.block_size, learn, self.batch_size, evenly)
            for part in self._stored
        )
        self.window_weights = self.train.learned_of_rows if evenly else None
        self._cached = {}
        for rows, name in ((self.train, "train on"), (self.held_out, "hold out")):
            if not rows.pieces.begins.size:
                raise InputError(
                    f"there is no answer to {name}: conversations need turns of the assistant "
                    "that begin within a window; raise --block-size, or give more of them"
                )

    def __repr__(self) -> str:
        return (
            f"<PackedDataset: {self.train.count:,} training and {self.held_out.count:,} held-out "
            f"rows, batches of {self.batch_size} x {self.block_size}>"
        )

    @property
    def stored(self) -> tuple[Tokens, Tokens]:
        return self._stored

    @property
    def learned_share(self) -> float:
        return self.train.learned / (self.train.count * self.block_size)

    def filled_first(self) -> "PackedDataset":
        """Returns the same conversations in rows that are filled one after another."""
        sizes = self.block_size, self.batch_size, self.seed
        return PackedDataset(*self._stored, *sizes, self.tokenizer, self.learn, evenly=False)

    def batches_of(self, part: str) -> int:
        return self._rows(part).batches(self.batch_size)

    def _rows(self, part: str) -> "PackedRows":
        return self.train if part == "train" else self.held_out

    def windows(self, starts: np.ndarray, out: Batch | None = None) -> Batch:
        """-> the rows that begin at starts (B,), multiples of block_size."""
        return self.train.batch(starts // self.block_size, out)._replace(starts=starts)

    def evaluation_batch(self, part: str, number: int) -> Batch:
        """-> batch `number` of a part, in an order of its rows that is always the same.

        Each row is in one batch; the last one may have fewer. Beyond them it begins anew.
        """
        rows = self._rows(part)
        number %= rows.batches(self.batch_size)
        order = hash_words(np.arange(rows.count), hash64(self.seed, 5, part == "train"))
        chosen = np.argsort(order, kind="stable")
        return rows.batch(chosen[number * self.batch_size :][: self.batch_size])

    def questions(self, most: int, longest: int) -> list[Question]:
        """Returns held-out questions, evenly, with answers of at most `longest` if any."""
        rows = self.held_out
        marked = [rows.piece(i) for i in range(len(rows.pieces.begins))]
        found = [question for tokens in marked for question in questions_in(tokens)]
        found = [question for question in found if len(question.answer) <= longest] or found
        return spread(found, most)

    def as_text(self) -> Dataset:
        """-> the training part as one text, with its windows anywhere: for what needs no masks."""
        ids = self._stored[0][: 64 * self.batch_size * self.block_size] // MARK_KINDS
        return Dataset(ids, min(self.block_size, len(ids) // 2), self.batch_size, self.seed)


class PackedRows:
    """The rows of one part; as tokens, their inputs one after another, and one more."""

    def __init__(
        self, marked: Tokens, T: int, learn: str, batch_size: int, evenly: bool = True
    ) -> None:
        self._marked, self.T, self._learns_all = marked, T, learn == "all"
        self.pieces = find_pieces(marked, T, self._learns_all)
        learned = self.pieces.learned
        lengths = self.pieces.lengths - 1
        order, self._ends = (
            pack_evenly(lengths, learned, T, batch_size) if evenly else pack(lengths, T)
        )
        self._begins, self._lengths = self.pieces.begins[order], self.pieces.lengths[order]
        self.count = len(self._ends)
        self.learned_of_rows = np.diff(np.cumsum(learned[order])[self._ends - 1], prepend=0)
        self.learned = int(self.pieces.learned.sum())
        self.tokens = int(self._lengths.sum())

    def __len__(self) -> int:
        return self.count * self.T + 1

    def __getitem__(self, places: slice) -> np.ndarray:
        first, last, _ = places.indices(len(self))
        rows = np.arange(first // self.T, min(self.count, math.ceil(last / self.T)))
        ids = np.append(self.batch(rows).ids, np.int32(0)) if len(rows) else np.zeros(1, np.int32)
        return ids[first - first // self.T * self.T :][: max(0, last - first)]

    def piece(self, number: int) -> np.ndarray:
        """Returns the marked tokens of a piece, in the order of the text."""
        begin, length = self.pieces.begins[number], self.pieces.lengths[number]
        return self._marked[begin : begin + length]

    @property
    def padding(self) -> float:
        """The share of all places that no conversation takes."""
        taken = self.tokens - len(self._lengths)
        return 1 - taken / (self.count * self.T) if self.count else 0.0

    def batches(self, batch_size: int) -> int:
        """Returns the number of batches that have each row once."""
        return math.ceil(self.count / batch_size)

    def batch(self, rows: np.ndarray, out: Batch | None = None) -> Batch:
        """rows (B,) by number -> their batch, in the first rows of `out` if given.

        Empty places have token 0, weight 0, and are documents of their own.
        """
        B, T = len(rows), self.T
        if out is None:
            shape = B, T
            out = Batch(
                np.empty(shape, np.int32),
                np.empty(shape, np.int32),
                rows,
                np.empty(shape, np.float32),
                firsts=np.empty(shape, np.int32),
            )
        ids, targets, weights, firsts = out.ids, out.targets, out.weights, out.firsts
        assert weights is not None and firsts is not None
        for i, row in enumerate(rows.tolist()):
            first = 0
            for piece in range(self._ends[row - 1] if row else 0, self._ends[row]):
                begin, length = self._begins[piece], self._lengths[piece]
                marked = self._marked[begin : begin + length]
                end = first + length - 1
                ids[i, first:end] = marked[:-1] // MARK_KINDS
                targets[i, first:end] = marked[1:] // MARK_KINDS
                weights[i, first:end] = self._learns_all or marked[1:] % MARK_KINDS == LEARNED
                firsts[i, first:end] = first
                first = end
            ids[i, first:], targets[i, first:], weights[i, first:] = 0, 0, 0.0
            firsts[i, first:] = np.arange(first, T)
        return Batch(ids[:B], targets[:B], rows, weights[:B], firsts=firsts[:B])


def spread(questions: list[Question], most: int) -> list[Question]:
    """Returns at most so many of them, evenly."""
    count = len(questions)
    return [questions[i * count // most] for i in range(most)] if count > most else questions


def questions_in(marked: np.ndarray) -> Iterator[Question]:
    """Yields a question for each answer in the marked tokens of a conversation, not a document."""
    ids = np.asarray(marked) // MARK_KINDS
    learned = np.concatenate([[False], np.asarray(marked) % MARK_KINDS == LEARNED, [False]])
    borders = np.flatnonzero(learned[1:] != learned[:-1])
    previous = 0
    for begin, end in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True):
        if begin > 1:  # a document is learned from its second token on
            yield Question(ids[:begin], ids[previous:begin], ids[begin:end])
        previous = end


def find_pieces(marked: Tokens, T: int, learns_all: bool = False) -> Pieces:
    """marked (n,) -> the pieces of conversations that windows of T hold.

    What is longer is cut before a turn that follows an answer; a plain document anywhere.
    """
    starts, cuts, places = _survey(marked)

    def learned_between(begin: Any, end: Any) -> np.ndarray:
        return np.searchsorted(places, end) - np.searchsorted(places, begin)

    ends = np.append(starts[1:], len(marked))
    lengths = ends - starts
    fits = lengths <= T + 1
    begins, sizes = [starts[fits]], [lengths[fits]]
    cut_short = several = 0
    for start, end in zip(starts[~fits].tolist(), ends[~fits].tolist(), strict=True):
        activity.tick()
        inner = cuts[np.searchsorted(cuts, start) : np.searchsorted(cuts, end)].tolist()
        is_text = learned_between(start + 1, end) == end - start - 1
        if is_text:
            divided = [(at, min(T + 1, end - at)) for at in range(start, end - 1, T)]
        else:
            divided = list(_divided([start, *inner, end], T + 1))
            cut_short += sum(length > T + 1 for _, length in divided)
            several += len(divided) > 1
        begins.append(np.array([begin for begin, _ in divided], np.int64))
        sizes.append(np.array([min(T + 1, length) for _, length in divided], np.int64))
    begin, size = np.concatenate(begins), np.concatenate(sizes)
    order = np.argsort(begin, kind="stable")
    begin, size = begin[order], size[order]
    learned = np.maximum(size - 1, 0) if learns_all else learned_between(begin + 1, begin + size)
    has_any = learned > 0
    left_out = int((~has_any).sum())
    return Pieces(begin[has_any], size[has_any], learned[has_any], several, cut_short, left_out)


def _divided(borders: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Borders of exchanges -> where each piece begins, and its length: as many as `most` hold."""
    begin = borders[0]
    for border, following in zip(borders[1:], [*borders[2:], None], strict=True):
        if following is None or following - begin > most:
            yield begin, border - begin
            begin = border


def _survey(marked: Tokens) -> Iterator[np.ndarray]:
    """-> where conversations begin, where they may be cut, and where tokens are learned."""
    found: dict[int, list[np.ndarray]] = {kind: [] for kind in (START, CUT, LEARNED)}
    with activity.doing("Packing conversations", usual=len(marked) < activity.LARGE):
        for first in activity.parts(range(0, len(marked), CHUNK)):
            kinds = marked[first : first + CHUNK] % MARK_KINDS
            for kind, places in found.items():
                places.append(np.flatnonzero(kinds == kind) + first)
    return (np.concatenate([np.empty(0, np.int64), *places]) for places in found.values())
