"""A teacher's logits on disk: the likeliest tokens after every token of a text.

A teacher's logits depend on the window that it saw a token in. So the text is cut into windows of
block_size, one behind the other, and a run that reads the cache draws its windows from these alone:
what it reads is what the teacher would say, rounded to float16. Tokens after the last whole window
are left out.

Of each distribution the k largest log-probabilities are kept, and as one number more that of each
other token: the rest of the probability is spread evenly over them. With k = V nothing is left out.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import numpy as np

from smallmind import safetensors
from smallmind.config import InputError
from smallmind.kernels.half import FLOAT16
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Workspace
from smallmind.text.dataset import Dataset

FORMAT = "smallmind teacher cache 1"
LEAST = -65504.0  # the least finite float16: a probability of zero at any temperature
AT_ONCE = 2048  # tokens that go through the teacher together


class TeacherCache:
    """What make_cache wrote for this teacher, of this digest, and the training part of a dataset.

    The file stays mapped: memory holds the pages in use. InputError where it was made for another
    teacher, text, window or k, or is damaged.
    """

    def __init__(
        self, path: str | PathLike[str], teacher: str, vocab_size: int, top_k: int, dataset: Dataset
    ) -> None:
        tensors, metadata = safetensors.read_mapped(path)
        if metadata.get("format") != FORMAT:
            raise InputError(f"{path} is not a cache of a teacher's logits, {FORMAT!r}")
        for name, value in _key(teacher, top_k, dataset).items():
            if metadata.get(name) != value:
                raise InputError(
                    f"{path} was made for another {name.replace('_', ' ')}: "
                    f"{metadata.get(name, 'none')[:16]} and not {value[:16]}; "
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
        self.vocab_size = vocab_size
        self.block_size = dataset.block_size
        self._tensors = tensors["indices"], tensors["log_probabilities"].view(FLOAT16)

    @contextmanager
    def logits(self, starts: np.ndarray, workspace: Workspace) -> Iterator[np.ndarray]:
        """starts (B,) of windows -> their teacher's logits (B T, V), rented for the block."""
        B, T, V, K = len(starts), self.block_size, self.vocab_size, self._tensors[0].shape[1]
        pool = workspace.pool
        with (
            pool.borrow((B * T, V), workspace.dtype) as logits,
            pool.borrow((B * T, K), np.int32) as indices,
            pool.borrow((B * T, K + 1), FLOAT16) as log_probabilities,
        ):
            for row, start in enumerate(starts):
                window, place = int(start), row * T
                for rented, mapped in zip((indices, log_probabilities), self._tensors, strict=True):
                    rented[place : place + T] = mapped[window : window + T]
            if indices.min() < 0 or indices.max() >= V:
                raise InputError(f"{self.path} was changed while it was read; remove it")
            workspace.kernels.top_k_logits(logits, indices, log_probabilities)
            yield logits


def make_cache(
    path: str | PathLike[str], teacher: TransformerModel, digest: str, top_k: int, dataset: Dataset
) -> None:
    """Runs the teacher once over the training part of dataset and writes a cache of its logits.

    The file is there whole or not at all; memory does not grow with the text. OSError where the
    disk does not take it, which for a while must hold it twice.
    """
    T, V, K, windows = dataset.block_size, teacher.config.vocab_size, top_k, _windows(dataset)
    directory = Path(path).absolute().parent
    with (
        tempfile.TemporaryFile(dir=directory) as indices,
        tempfile.TemporaryFile(dir=directory) as log_probabilities,
    ):
        at_once = max(1, AT_ONCE // T)
        for first in range(0, windows, at_once):
            places = np.arange(first, min(windows, first + at_once)) * T
            with teacher.logits(dataset.train[places[:, None] + np.arange(T)]) as logits:
                chosen, kept = _largest(logits, K)
            indices.write(chosen.astype("<i4").data)
            log_probabilities.write(kept.astype("<f2").data)
        tensors = {
            "indices": _mapped(indices, "<i4", (windows * T, K)),
            "log_probabilities": _mapped(log_probabilities, "<f2", (windows * T, K + 1)),
        }
        key = _key(digest, top_k, dataset)
        safetensors.write(path, tensors, {"format": FORMAT, "vocab_size": str(V), **key})


def _mapped(file: BinaryIO, dtype: str, shape: tuple[int, int]) -> np.ndarray:
    file.flush()
    return np.memmap(file, dtype, "r", shape=shape)


def _largest(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """logits (R, V) -> the k likeliest tokens of each row, and k + 1 log-probabilities."""
    R, V = logits.shape
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    p = np.exp(shifted)
    totals = p.sum(axis=1, keepdims=True)
    # A stable order: the same file whatever sorts equals.
    chosen = np.argsort(-shifted, axis=1, kind="stable")[:, :k]
    kept = np.full((R, k + 1), LEAST)
    kept[:, :k] = np.take_along_axis(shifted - np.log(totals), chosen, axis=1)
    if k < V:
        np.put_along_axis(p, chosen, 0, axis=1)
        with np.errstate(divide="ignore"):
            kept[:, k] = np.log(p.sum(axis=1) / totals[:, 0] / (V - k))
    return chosen, np.maximum(kept, LEAST)


def _windows(dataset: Dataset) -> int:
    """How many windows of the training part a cache has."""
    return (len(dataset.train) - dataset.block_size - 1) // dataset.block_size + 1


def _key(teacher: str, top_k: int, dataset: Dataset) -> dict[str, str]:
    """What a cache must have been made for."""
    tokens = np.ascontiguousarray(dataset.train, "<i4")
    return {
        "teacher": teacher,
        "text": hashlib.sha256(tokens.data).hexdigest(),
        "block_size": str(dataset.block_size),
        "top_k": str(top_k),
    }
