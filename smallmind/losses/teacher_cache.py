"""A teacher's logits on disk: the most likely tokens after every token of a text.

A teacher's logits depend on the window in which it sees a token. The text is therefore cut into
consecutive windows of block_size, and a run with a cache draws only these windows: what it reads is
what the teacher would compute, rounded to float16. Tokens after the last whole window are left out.

For each token the k largest log-probabilities are stored, and one number for all other tokens,
which share the remaining probability evenly. With k = V nothing is lost.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.files import safetensors
from smallmind.files.safetensors import StoredTensor
from smallmind.kernels.number_types import FLOAT16
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Workspace
from smallmind.text.dataset import Dataset

FORMAT = "smallmind teacher cache 1"
MIN_LOG_PROBABILITY = -65504.0  # smallest finite float16; exp of it is 0 at any temperature
TOKENS_PER_PASS = 2048  # of the teacher, while it fills a cache
TOKENS_PER_READ = 1 << 18  # while the text is identified


class TeacherCache:
    """The cache that make_cache wrote for the training part of a dataset.

    `teacher` is the teacher's digest. Memory holds only the rows in use.
    InputError if it was made for another teacher, text, window or k, or is damaged.
    """

    def __init__(
        self, path: str | PathLike[str], teacher: str, vocab_size: int, top_k: int, dataset: Dataset
    ) -> None:
        tensors, metadata = safetensors.open_tensors(path)
        if metadata.get("format") != FORMAT:
            raise InputError(f"{path} is not a cache of a teacher's logits ({FORMAT!r})")
        for name, value in _key(teacher, top_k, dataset).items():
            if metadata.get(name) != value:
                raise InputError(
                    f"{path} was made for another {name.replace('_', ' ')}: "
                    f"{metadata.get(name, 'none')[:16]}, not {value[:16]}; "
                    "remove it or name another file"
                )
        rows = _windows(dataset) * dataset.block_size
        shapes = {name: (x.shape, x.dtype.str) for name, x in tensors.items()}
        if shapes != {
            "indices": ((rows, top_k), "<i4"),
            "log_probabilities": ((rows, top_k + 1), "<f2"),
        }:
            raise InputError(f"{path} does not hold what its metadata describes; remove it")
        self.path = path
        self.vocab_size, self.block_size, self.top_k = vocab_size, dataset.block_size, top_k
        self._tensors: tuple[StoredTensor, ...]
        self._tensors = tensors["indices"], tensors["log_probabilities"]

    @contextmanager
    def logits(
        self, starts: np.ndarray, workspace: Workspace, rows: slice | None = None
    ) -> Iterator[np.ndarray]:
        """starts (B,) of windows -> the teacher's logits (B T, V), rented for the block.

        With rows, only those of them.
        """
        T, V, K = self.block_size, self.vocab_size, self.top_k
        rows = rows or slice(0, len(starts) * T)
        R = rows.stop - rows.start
        if (starts % T).any():
            raise InputError(f"a cache has only windows that start at multiples of {T}: {starts}")
        pool = workspace.pool
        with (
            pool.borrow((R, V), workspace.dtype) as logits,
            pool.borrow((R, K), np.int32) as indices,
            pool.borrow((R, K + 1), FLOAT16) as log_probabilities,
        ):
            row = rows.start
            while row < rows.stop:
                window, first = divmod(row, T)
                count = min(T - first, rows.stop - row)
                here = slice(row - rows.start, row - rows.start + count)
                for stored, rented in zip(
                    self._tensors, (indices, log_probabilities), strict=False
                ):
                    stored.read_rows(int(starts[window]) + first, rented[here])
                row += count
            if indices.min() < 0 or indices.max() >= V:
                raise InputError(f"{self.path} was changed while it was read; remove it")
            workspace.kernels.top_k_logits(logits, indices, log_probabilities)
            yield logits


class CacheOutline(TeacherCache):
    """A cache that has shapes and no contents."""

    def __init__(self, vocab_size: int, block_size: int, top_k: int) -> None:
        self.path, self._tensors = "a dry run", ()
        self.vocab_size, self.block_size, self.top_k = vocab_size, block_size, top_k


def make_cache(
    path: str | PathLike[str],
    teacher: TransformerModel,
    digest: str,
    top_k: int,
    dataset: Dataset,
    tokens_per_pass: int = TOKENS_PER_PASS,
) -> None:
    """Runs the teacher once over the training part of dataset and writes a cache of its logits.

    The file is complete or does not exist; memory does not grow with the text. OSError if the disk
    refuses it; it needs space for two copies while the cache is made.
    """
    T, V, K, windows = dataset.block_size, teacher.config.vocab_size, top_k, _windows(dataset)
    directory = Path(path).absolute().parent
    with (
        tempfile.TemporaryFile(dir=directory) as indices,
        tempfile.TemporaryFile(dir=directory) as log_probabilities,
    ):
        windows_per_pass = max(1, tokens_per_pass // T)
        for first in activity.parts(range(0, windows, windows_per_pass)):
            starts = np.arange(first, min(windows, first + windows_per_pass)) * T
            batch = dataset.windows(starts)
            tokens, kept = teacher.with_logits(
                batch.ids, lambda x: top_k_log_probabilities(x, K), batch.firsts
            )
            indices.write(tokens.astype("<i4").data)
            log_probabilities.write(kept.astype("<f2").data)
        teacher.workspace.pool.trim()  # the student takes arrays of other sizes
        tensors = {
            "indices": _mapped(indices, "<i4", (windows * T, K)),
            "log_probabilities": _mapped(log_probabilities, "<f2", (windows * T, K + 1)),
        }
        key = _key(digest, top_k, dataset)
        safetensors.write(path, tensors, {"format": FORMAT, "vocab_size": str(V), **key})


def _mapped(file: BinaryIO, dtype: str, shape: tuple[int, int]) -> np.ndarray:
    file.flush()
    return np.memmap(file, dtype, "r", shape=shape)


def top_k_log_probabilities(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """logits (R, V) -> the k most likely tokens (R, k), and log-probabilities (R, k + 1).

    The last one is that of each remaining token, as if these were equally likely.
    """
    R, V = logits.shape
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    p = np.exp(shifted)
    totals = p.sum(axis=1, keepdims=True)
    # A stable sort: ties always give the same file.
    chosen = np.argsort(-shifted, axis=1, kind="stable")[:, :k]
    kept = np.full((R, k + 1), MIN_LOG_PROBABILITY)
    kept[:, :k] = np.take_along_axis(shifted - np.log(totals), chosen, axis=1)
    if k < V:
        np.put_along_axis(p, chosen, 0, axis=1)
        with np.errstate(divide="ignore"):
            kept[:, k] = np.log(p.sum(axis=1) / totals[:, 0] / (V - k))
    return chosen, np.maximum(kept, MIN_LOG_PROBABILITY)


def _windows(dataset: Dataset) -> int:
    """Returns the number of windows of the training part that are cached."""
    return (len(dataset.train) - dataset.block_size - 1) // dataset.block_size + 1


def _key(teacher: str, top_k: int, dataset: Dataset) -> dict[str, str]:
    """Returns the metadata that identifies the cache of a teacher, a text, a window and k."""
    text, tokens = hashlib.sha256(), dataset.train
    for start in activity.parts(range(0, len(tokens), TOKENS_PER_READ)):
        text.update(np.ascontiguousarray(tokens[start : start + TOKENS_PER_READ], "<i4").data)
    return {
        "teacher": teacher,
        "text": text.hexdigest(),
        "block_size": str(dataset.block_size),
        "top_k": str(top_k),
    }
