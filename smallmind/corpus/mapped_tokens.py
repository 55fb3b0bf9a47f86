"""The tokens of files as one sequence that is sliced like an array and never loaded whole."""

import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from os import PathLike
from typing import Any, SupportsIndex, overload

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.token_files import TokenFile

CHUNK = 2**20  # tokens that are checked at once


class MappedTokens:
    """Tokens of one or several files, one after the other; `tokens[a:b]` reads them from disk.

    `tokens[a:b]` is a new int32 array (b - a,) and `tokens[i]` an int, with bounds as in an array.
    `part` is a range of the tokens that reads nothing yet.
    """

    def __init__(self, files: Iterable[TokenFile]) -> None:
        self.files = tuple(files)
        self._ends = list(accumulate(map(len, self.files)))  # of each file, in the sequence
        self._start = 0
        self._stop = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return self._stop - self._start

    def __repr__(self) -> str:
        return f"<MappedTokens: {len(self):,} tokens in {len(self.files)} files>"

    @overload
    def __getitem__(self, key: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> np.ndarray: ...
    def __getitem__(self, key: SupportsIndex | slice) -> int | np.ndarray:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ValueError(f"tokens in files are sliced with step 1, not {step}")
            return self._read(start, max(start, stop))
        if not hasattr(key, "__index__") or isinstance(key, np.ndarray):
            kind = type(key).__name__
            raise TypeError(f"tokens in files are indexed by an integer or a slice, not {kind}")
        index = operator.index(key)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} tokens")
        index %= len(self)
        return int(self._read(index, index + 1)[0])

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        # NumPy would read the tokens one by one into a list.
        raise TypeError("tokens in files are not loaded whole; take slices or iter_chunks()")

    def part(self, start: int | None = None, stop: int | None = None) -> "MappedTokens":
        """The tokens from start to stop, as a sequence of its own; bounds as in a slice."""
        first, last, _ = slice(start, stop).indices(len(self))
        part = MappedTokens(self.files)
        part._start, part._stop = self._start + first, self._start + max(first, last)
        return part

    def iter_chunks(self, size: int) -> Iterator[np.ndarray]:
        """All tokens in order, in arrays of `size`; the last one may be shorter."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def locate(self, index: int) -> tuple[TokenFile, int]:
        """The file that holds a token, and the token's number in that file."""
        place = self._start + range(len(self))[index]
        number = bisect_right(self._ends, place)
        file = self.files[number]
        return file, place - (self._ends[number] - len(file))

    def _read(self, start: int, stop: int) -> np.ndarray:
        out = np.empty(stop - start, np.int32)
        place, rest = self._start + start, out
        number = bisect_right(self._ends, place)
        while len(rest):
            file, end = self.files[number], self._ends[number]
            here = rest[: end - place]
            file.read(place - (end - len(file)), here)
            place, rest, number = end, rest[len(here) :], number + 1
        return out


def open_tokens(*paths: str | PathLike[str]) -> MappedTokens:
    """The tokens of files, in this order. InputError for the first that is not a token file."""
    if not paths:
        raise InputError("no token file was given")
    return MappedTokens([TokenFile(path) for path in paths])


def check_vocabulary(tokens: MappedTokens, vocab_size: int) -> None:
    """InputError naming file and position of the first id that is not below vocab_size.

    Reads all tokens once, a chunk at a time.
    """
    usual = len(tokens) < activity.LARGE
    with activity.doing("Checking that all tokens are in the vocabulary", usual):
        for start in activity.parts(range(0, len(tokens), CHUNK)):
            ids: Any = tokens[start : start + CHUNK].view(np.uint32)  # as in the file
            if ids.max() >= vocab_size:
                wrong = int(np.argmax(ids >= vocab_size))
                file, place = tokens.locate(start + wrong)
                raise InputError(
                    f"{file.path}: token {place:,} is {ids[wrong]}, outside the vocabulary of "
                    f"{vocab_size:,}; the file was made with another tokenizer or is damaged"
                )
