"""Files of token ids as other programs write them, read as one sequence of tokens.

With llm.c's header: 256 little-endian int32 [magic, version, n, 0, ...], then n ids. modded-nanogpt
reads the same files. https://github.com/karpathy/llm.c, dev/data/data_common.py.

Without a header: nothing but ids, of the type that `meta.json` beside the file names, as in
{"dtype": "uint16"}; nanoGPT's train.bin and val.bin are uint16. Its meta.pkl is never opened: a
pickle can run any code.
"""

import operator
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np

from smallmind.checks import InputError, count_of, from_json, shown_value
from smallmind.console import activity
from smallmind.files import durable
from smallmind.files.encoding import disguised

HEADER_BYTES = 1024
SAMPLE_BYTES = 2**16  # that tell how wide the ids are
EVALUATION_MAGIC = 20240522  # llm.c's multiple-choice questions, such as HellaSwag
META_NAME = "meta.json"
MAX_META_BYTES = 1_000_000
NANOGPT_NAMES = ("train.bin", "val.bin")
UINT16, UINT32 = np.dtype("<u2"), np.dtype("<u4")
TOKENS_PER_CHECK = 2**20  # tokens that are checked at once
TOKENS_PER_READ = 2**18  # so that a long slice needs little memory besides itself


# The first two numbers of a header, and the type of the ids after it: GPT-2's, and Llama 3's.
HEADERS = ((20240520, 1, UINT16), (20240801, 7, UINT32))
_seeking = threading.Lock()


class TokenFile:
    """The ids of a file, which stays open; they are read when they are asked for.

    The file must not be modified meanwhile. InputError, one line, if it is missing, damaged or of
    another format.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise InputError(f"{path} is a directory; give the token files in it")
        if not os.path.lexists(path):
            raise InputError(f"{path} does not exist; give the path of a token file")
        with durable.explained(path, "token file"), durable.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            self.dtype, self._start = _layout(self.path, file.read(SAMPLE_BYTES), size)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._tokens = (size - self._start) // self.dtype.itemsize

    def __len__(self) -> int:
        return self._tokens

    def __repr__(self) -> str:
        return f"<TokenFile {self.path}: {len(self):,} tokens of {self.dtype.name}>"

    def read(self, first: int, out: np.ndarray) -> None:
        """Reads the ids from number `first` on into out (n,), int32. InputError if they are gone.

        Ids from 2**31 on become negative. Reads at an offset rather than from a mapping: mapped
        pages count as memory of the process, and after a truncation they end it with SIGBUS.
        """
        width = self.dtype.itemsize
        for begin in range(0, len(out), TOKENS_PER_READ):
            piece = out[begin : begin + TOKENS_PER_READ]
            try:
                data = _read_at(self._file, len(piece) * width, self._start + first * width)
            except OSError as error:
                raise InputError(f"cannot read {self.path}: {error.strerror}") from None
            if len(data) < len(piece) * width:
                raise InputError(f"{self.path} was truncated while it was read; restore it")
            piece[:] = np.frombuffer(data, self.dtype)
            first += len(piece)


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
        return f"<MappedTokens: {len(self):,} tokens in {count_of(len(self.files), 'file')}>"

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
        raise TypeError("tokens in files are not loaded whole; take slices")

    def part(self, start: int | None = None, stop: int | None = None) -> "MappedTokens":
        """Returns the tokens from start to stop, as a sequence of its own; bounds as in a slice."""
        first, last, _ = slice(start, stop).indices(len(self))
        part = MappedTokens(self.files)
        part._start, part._stop = self._start + first, self._start + max(first, last)
        return part

    def locate(self, index: int) -> tuple[TokenFile, int]:
        """Returns the file that holds a token, and the token's number in that file."""
        position = self._start + range(len(self))[index]
        number = bisect_right(self._ends, position)
        file = self.files[number]
        return file, position - (self._ends[number] - len(file))

    def _read(self, start: int, stop: int) -> np.ndarray:
        out = np.empty(stop - start, np.int32)
        position, rest = self._start + start, out
        number = bisect_right(self._ends, position)
        while len(rest):
            file, end = self.files[number], self._ends[number]
            here = rest[: end - position]
            file.read(position - (end - len(file)), here)
            position, rest, number = end, rest[len(here) :], number + 1
        return out


def check_vocabulary(tokens: MappedTokens, vocab_size: int) -> None:
    """Raises InputError naming file and position of the first id that is not below vocab_size."""
    usual = len(tokens) < activity.LARGE
    with activity.doing("Checking that all tokens are in the vocabulary", usual):
        for start in activity.parts(range(0, len(tokens), TOKENS_PER_CHECK)):
            ids: Any = tokens[start : start + TOKENS_PER_CHECK].view(np.uint32)  # as in the file
            if ids.max() >= vocab_size:
                wrong = int(np.argmax(ids >= vocab_size))
                file, position = tokens.locate(start + wrong)
                raise InputError(
                    f"{file.path}: token {position:,} is {ids[wrong]}, outside the vocabulary of "
                    f"{vocab_size:,}; the file was made with another tokenizer or is damaged"
                )


def encode_header(dtype: np.dtype, tokens: int) -> bytes:
    """Returns the header of a file with this many ids of UINT16 or UINT32."""
    magic, version = next(header[:2] for header in HEADERS if header[2] == dtype)
    numbers = np.zeros(HEADER_BYTES // 4, "<i4")
    numbers[:3] = magic, version, tokens
    return numbers.tobytes()


def dtype_for(vocab_size: int) -> np.dtype:
    """Returns the smaller of the two types that holds every id below vocab_size."""
    return UINT16 if vocab_size <= 2**16 else UINT32


def _read_at(file: int, nbytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(file, nbytes, offset)
    with _seeking:  # on Windows, where threads share the place in an open file
        os.lseek(file, offset, os.SEEK_SET)
        return os.read(file, nbytes)


def _layout(path: Path, start: bytes, size: int) -> tuple[np.dtype, int]:
    """The first bytes of a file and its size -> the type of its ids, and where they begin."""
    if not size:
        raise ValueError("it is empty")
    magic = int.from_bytes(start[:4], "little")
    if magic == EVALUATION_MAGIC:
        raise ValueError(
            f"its magic number, {magic}, is that of llm.c's evaluation sets, which hold questions "
            "with answers; give a file of plain tokens"
        )
    for known, version, dtype in HEADERS:
        if known == magic:
            _check_header(version, dtype, start, size)
            return dtype, HEADER_BYTES
    if found := disguised(start):
        raise InputError(f"{path} is {found.kind}; {found.advice(str(path))}")
    dtype = _type_without_header(path, start)
    if size % dtype.itemsize:
        raise ValueError(f"its {size:,} bytes are not a whole number of {dtype.name} ids")
    return dtype, 0


def _check_halves(path: Path, start: bytes) -> None:
    """Raises InputError if what begins like this seems to hold wider ids than UINT16.

    The upper halves of ids of 32 bits are 0, or few for vocabularies of more than 65,536.
    """
    halves = np.frombuffer(start[: len(start) // 8 * 8], UINT16)
    if not halves.any() or halves[1::2].max() > halves[::2].max() // 1000:
        return
    if not halves[2::4].any() and not halves[3::4].any():
        raise InputError(
            f"{path} seems to hold ids of 64 bits: three of every four half-words are 0; write "
            "them as uint16 or uint32"
        )
    raise InputError(
        f"{path} seems to hold ids of 32 bits: every second half-word is 0 or small; if it does, "
        f'put {{"dtype": "uint32"}} into {META_NAME} beside it, else {{"dtype": "uint16"}}'
    )


def _check_header(known: int, dtype: np.dtype, start: bytes, size: int) -> None:
    """Raises ValueError unless the header fits the size of its file."""
    if len(start) < HEADER_BYTES:
        raise ValueError(f"it ends within its header: {size:,} of {HEADER_BYTES:,} bytes")
    _, version, tokens = np.frombuffer(start, "<i4", 3).tolist()
    if version != known:
        raise ValueError(f"it has version {version}; version {known} is read")
    if tokens < 1:
        raise ValueError(f"its header announces {tokens:,} tokens")
    expected = HEADER_BYTES + tokens * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"its header announces {tokens:,} tokens, which take {expected:,} bytes; it has "
            f"{size:,}: copy it again"
        )


def _type_without_header(path: Path, start: bytes) -> np.dtype:
    """Returns the type of the ids in a file that has no known header, and begins like this."""
    meta = path.with_name(META_NAME)
    if not os.path.lexists(meta):
        if path.name in NANOGPT_NAMES:
            _check_halves(path, start)
            return UINT16
        raise InputError(
            f"{path} has no header of a token file; if it holds nothing but ids, put their type "
            f'into {META_NAME} beside it: {{"dtype": "uint16"}} or {{"dtype": "uint32"}}'
        )
    with durable.explained(meta, "JSON file"):
        fields = from_json(durable.read(meta, MAX_META_BYTES))
    name = fields.get("dtype") if isinstance(fields, dict) else None
    for dtype in (UINT16, UINT32):
        if name == dtype.name:
            return dtype
    raise InputError(f"{meta}: dtype={shown_value(name)} must be uint16 or uint32")
