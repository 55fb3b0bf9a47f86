"""Texts from files, their split, and the batches that are drawn from them."""

from pathlib import Path

import numpy as np

from smallmind import durable
from smallmind.config import InputError
from smallmind.randomness import mix

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
    Its windows of the training part begin at multiples of `stride`, 1 unless it is set.
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

    def batch(self, number: int, out: Batch | None = None) -> Batch:
        """number -> ids, targets, int32 (B, T): windows of the training part, in `out` if given."""
        return self._windows(self.train, 0, number, out, self.stride)

    def starts(self, number: int) -> np.ndarray:
        """number -> where in the training part the windows of that batch begin, (B,)."""
        return np.array(self._starts(self.train, 0, number, self.block_size, self.stride))

    def evaluation_batch(self, part: str, number: int) -> Batch:
        """part "train" or "held_out", number -> ids, targets: the same at every evaluation."""
        return self._windows(getattr(self, part), 1 + (part == "train"), number, None)

    def _starts(
        self, tokens: np.ndarray, stream: int, number: int, T: int, stride: int
    ) -> list[int]:
        places = (len(tokens) - T - 1) // stride + 1
        rows = range(self.batch_size)
        return [mix(self.seed, stream, number, row) % places * stride for row in rows]

    def _windows(
        self, tokens: np.ndarray, stream: int, number: int, out: Batch | None, stride: int = 1
    ) -> Batch:
        # A held-out part shorter than a window still counts, in shorter windows.
        B, T = self.batch_size, min(self.block_size, len(tokens) - 1)
        ids, targets = out or (np.empty((B, T), np.int32), np.empty((B, T), np.int32))
        for row, start in enumerate(self._starts(tokens, stream, number, T, stride)):
            ids[row] = tokens[start : start + T]
            targets[row] = tokens[start + 1 : start + T + 1]
        return ids, targets
