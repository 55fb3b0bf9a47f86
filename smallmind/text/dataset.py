"""Texts from files, their split, and the batches that are drawn from them."""

import math
from pathlib import Path

import numpy as np

from smallmind import durable
from smallmind.config import InputError
from smallmind.randomness import hash64, hash_words

HELD_OUT = 0.1  # the share at the end of a text that is never trained on

Batch = tuple[np.ndarray, np.ndarray]


def read_text(path: str) -> str:
    """path -> its text. InputError, one line, where there is none that can be read as UTF-8."""
    if Path(path).is_dir():
        raise InputError(f"{path} is a directory; give a text file in it")
    try:
        with durable.open_regular(path) as file:
            data = file.read()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a UTF-8 text file") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise InputError(
            f"{path} is no regular file, and a run that goes on reads its text again; "
            "write it to a file first"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}; "
            "convert it, for example with iconv -t utf-8"
        ) from None
    if not text:
        raise InputError(f"{path} is empty; give a file with text in it")
    return text


class Dataset:
    """The tokens of a text, the last tenth held out, and batches of windows from either part.

    A batch is a function of the seed and its number: it does not matter which were drawn before.

    Windows are drawn at random by `batch`; by `epoch_batch` the training part is cut into
    `epoch_windows` of them, and each comes once an epoch, in an order of its own for each. An
    update never takes from two epochs, so that its last batches may be uneven. All begin at
    multiples of `stride`, 1 unless it is set.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, batch_size: int, seed: int) -> None:
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
        self.batch_size = batch_size
        self.seed = seed
        self.stride = 1
        self.epoch_windows = (len(self.train) - 1) // block_size
        self._order = -1, np.empty(0, np.int64)  # an epoch, and where its windows start

    def batch(self, number: int, out: Batch | None = None) -> Batch:
        """number -> ids, targets, int32 (B, T): windows of the training part, in `out` if given."""
        return _windows(self.train, self.block_size, self.starts(number), out)

    def starts(self, number: int) -> np.ndarray:
        """number -> where in the training part the windows of that batch begin, (B,)."""
        return self._random_starts(self.train, 0, number, self.block_size, self.stride)

    def epoch_steps(self, batches: int) -> int:
        """How many updates, of so many batches each, an epoch has."""
        return math.ceil(self.epoch_windows / (batches * self.batch_size))

    def windows_of(self, step: int, batches: int, by_epoch: bool) -> int:
        """How many windows the update of a step, from 1, has: the last of an epoch has the rest."""
        most = batches * self.batch_size
        if not by_epoch:
            return most
        return min(most, self.epoch_windows - (step - 1) % self.epoch_steps(batches) * most)

    def epoch_batch(self, number: int, batches: int, out: Batch | None = None) -> Batch:
        """number, from 0, of the batches of a run with so many an update -> ids, targets (b, T).

        They are the first rows of `out` if given; b is at most B, less where an epoch ends, or 0.
        """
        return _windows(self.train, self.block_size, self.epoch_starts(number, batches), out)

    def epoch_starts(self, number: int, batches: int) -> np.ndarray:
        """Where in the training part the windows of epoch_batch begin, (b,)."""
        epoch, place = divmod(number, self.epoch_steps(batches) * batches)
        if self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        return self._order[1][place * self.batch_size : (place + 1) * self.batch_size]

    def _shuffled(self, epoch: int) -> np.ndarray:
        """The starts of an epoch's windows. What they leave of the text changes with the epoch."""
        order = np.argsort(hash_words(np.arange(self.epoch_windows), hash64(self.seed, 3, epoch)))
        left = len(self.train) - 1 - self.epoch_windows * self.block_size
        first = hash64(self.seed, 4, epoch) % (left // self.stride + 1) * self.stride
        return order * self.block_size + first

    @property
    def held_out_batches(self) -> int:
        """How many batches have as many tokens as the held-out part."""
        return math.ceil(len(self.held_out) / (self.batch_size * self.block_size))

    def evaluation_batch(self, part: str, number: int) -> Batch:
        """part "train" or "held_out", number -> ids, targets: the same at every evaluation."""
        tokens = getattr(self, part)
        # A held-out part shorter than a window still counts, in shorter windows.
        T = min(self.block_size, len(tokens) - 1)
        starts = self._random_starts(tokens, 1 + (part == "train"), number, T, 1)
        return _windows(tokens, T, starts, None)

    def _random_starts(
        self, tokens: np.ndarray, stream: int, number: int, T: int, stride: int
    ) -> np.ndarray:
        places = (len(tokens) - T - 1) // stride + 1
        rows = range(self.batch_size)
        return np.array([hash64(self.seed, stream, number, row) % places * stride for row in rows])


def _windows(tokens: np.ndarray, T: int, starts: np.ndarray, out: Batch | None) -> Batch:
    """starts (b,) -> ids, targets (b, T), the first rows of `out` if given."""
    if out is None:
        out = np.empty((len(starts), T), np.int32), np.empty((len(starts), T), np.int32)
    ids, targets = out[0][: len(starts)], out[1][: len(starts)]
    for row, start in enumerate(starts):
        ids[row] = tokens[start : start + T]
        targets[row] = tokens[start + 1 : start + T + 1]
    return ids, targets
