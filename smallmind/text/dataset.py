"""Reading texts, and windows of their tokens."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallmind import activity, durable
from smallmind.checks import InputError, check_field, check_type
from smallmind.config import ModelConfig, RunConfig
from smallmind.randomness import hash64
from smallmind.text.encoding import advice, unmarked_utf16
from smallmind.text.tokenizer import Spelled, Tokenizer

HELD_OUT = 0.1  # share of a text, at its end, that is never trained on


class Batch(NamedTuple):
    """Windows of a sequence of tokens, and the token that follows each of their tokens."""

    ids: np.ndarray  # int32 (B, T)
    targets: np.ndarray  # int32 (B, T)
    starts: np.ndarray  # (B,), where in the sequence each window begins


def read_text(path: str) -> str:
    """The text of a UTF-8 file. InputError, one line, if it cannot be read."""
    try:
        if Path(path).is_dir():
            raise InputError(f"{path} is a directory; give a text file in it")
        with durable.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            with activity.doing(f"Reading {path}", usual=size < activity.LARGE):
                data = file.read()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a UTF-8 text file") from None
    except OSError as error:
        raise InputError(f"cannot read {path[:80]}: {error.strerror}") from None
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"{path} is not a regular file, and a resumed run reads its text again; "
            "write it to a file first"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}; "
            f"{advice(path, data)}"
        ) from None
    if unmarked_utf16(data):
        raise InputError(f"{path} is not UTF-8: every second byte is zero; {advice(path, data)}")
    if not text:
        raise InputError(f"{path} is empty; give a file with text in it")
    return text


class Dataset:
    """The tokens of a text, and windows of either part: the last `held_out` tokens are held out.

    By default that is a tenth of them.
    `batch_size` windows of `block_size` tokens make a batch. Samplers choose which windows to train
    on, by `seed`; evaluations always use the same ones. InputError if the text is too short.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        block_size: int,
        batch_size: int,
        seed: int,
        tokenizer: Tokenizer | None = None,
        held_out: int | None = None,
    ) -> None:
        check_type("tokens", tokens, np.ndarray)
        block_size = check_field(ModelConfig, "block_size", block_size)
        if held_out is None:
            held_out = int(len(tokens) * HELD_OUT)
        self.train = tokens[: len(tokens) - held_out]
        self.held_out = tokens[len(tokens) - held_out :]
        if len(self.train) <= block_size or held_out < 2:
            needed = max(20, block_size + 1 + block_size // 9)
            if len(tokens) < 20:
                raise InputError(f"a text needs at least 20 tokens; this one has {len(tokens)}")
            raise InputError(
                f"block_size={block_size} needs at least {needed} tokens, a tenth of them held "
                f"out; the text has {len(tokens)}: give a longer text or a smaller block_size"
            )
        self.block_size = block_size
        self.batch_size = check_field(RunConfig, "batch_size", batch_size)
        self.seed = check_field(RunConfig, "seed", seed)
        self.tokenizer = tokenizer

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
        batch_size: int = 12,
        seed: int = 1337,
        held_out: int | None = None,
    ) -> "Dataset":
        """The dataset of a text, whose last `held_out` characters are held out; None: a tenth.

        InputError if the tokenizer does not know a character.
        """
        check_type("text", text, str)
        check_type("tokenizer", tokenizer, Tokenizer)
        with activity.doing("Encoding the text", usual=len(text) < activity.LARGE):
            if held_out is None:
                return cls(tokenizer.encode(text), block_size, batch_size, seed, tokenizer)
            start = len(text) - held_out
            parts = [tokenizer.encode(text[:start]), tokenizer.encode(text[start:])]
        tokens, count = np.concatenate(parts), len(parts[1])
        return cls(tokens, block_size, batch_size, seed, tokenizer, count)

    def windows(self, starts: np.ndarray, out: Batch | None = None) -> Batch:
        """Windows of the training part that begin at starts (B,), in the first rows of `out`."""
        return _windows(self.train, self.block_size, starts, out)

    @property
    def held_out_batches(self) -> int:
        """The number of batches with as many tokens as the held-out part."""
        return math.ceil(len(self.held_out) / (self.batch_size * self.block_size))

    def spelled(self, tokens: np.ndarray) -> Spelled:
        """What tokens spell; without a tokenizer, a character of one byte each."""
        return self.tokenizer.spelled(tokens) if self.tokenizer else Spelled.as_bytes(tokens)

    def evaluation_batch(self, part: str, number: int) -> Batch:
        """Batch `number` of the part "train" or "held_out": the same in every evaluation."""
        tokens, stream = (self.train, 2) if part == "train" else (self.held_out, 1)
        # A held-out part shorter than a window is still evaluated, in shorter windows.
        T = min(self.block_size, len(tokens) - 1)
        starts = random_starts((self.seed, stream, number), self.batch_size, len(tokens) - T)
        return _windows(tokens, T, starts, None)


def random_starts(key: tuple[int, ...], count: int, limit: int, stride: int = 1) -> np.ndarray:
    """`count` multiples of stride below limit, determined by key."""
    choices = (limit - 1) // stride + 1
    return np.array([hash64(*key, row) % choices * stride for row in range(count)])


def _windows(tokens: np.ndarray, T: int, starts: np.ndarray, out: Batch | None) -> Batch:
    if out is None:
        shape = (len(starts), T)
        out = Batch(np.empty(shape, np.int32), np.empty(shape, np.int32), starts)
    ids, targets = out.ids[: len(starts)], out.targets[: len(starts)]
    for row, start in enumerate(starts):
        ids[row] = tokens[start : start + T]
        targets[row] = tokens[start + 1 : start + T + 1]
    return Batch(ids, targets, starts)
