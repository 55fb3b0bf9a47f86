"""Files of token ids as other programs write them.

With llm.c's header: 256 little-endian int32 [magic, version, n, 0, ...], then n ids. modded-nanogpt
reads the same files. https://github.com/karpathy/llm.c, dev/data/data_common.py.

Without a header: nothing but ids, of the type that `meta.json` beside the file names, as in
{"dtype": "uint16"}; nanoGPT's train.bin and val.bin are uint16. Its meta.pkl is never opened: a
pickle can run any code.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallmind.checks import InputError, shown_value
from smallmind.files import durable, safetensors

HEADER_BYTES = 1024
EVALUATION_MAGIC = 20240522  # llm.c's multiple-choice questions, such as HellaSwag
META = "meta.json"
MAX_META_BYTES = 1_000_000
NANOGPT = ("train.bin", "val.bin")
UINT16, UINT32 = np.dtype("<u2"), np.dtype("<u4")
PIECE = 2**18  # tokens that are read at once, so that a long slice needs little besides itself


class Header(NamedTuple):
    """The first two numbers of a header, and the type of the ids after it."""

    magic: int
    version: int
    dtype: np.dtype


HEADERS = (
    Header(20240520, 1, UINT16),  # GPT-2
    Header(20240801, 7, UINT32),  # Llama 3
)
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
        with _explained(path), durable.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            self.dtype, self._start = _layout(self.path, file.read(HEADER_BYTES), size)
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
        for begin in range(0, len(out), PIECE):
            piece = out[begin : begin + PIECE]
            try:
                data = _read_at(self._file, len(piece) * width, self._start + first * width)
            except OSError as error:
                raise InputError(f"cannot read {self.path}: {error.strerror}") from None
            if len(data) < len(piece) * width:
                raise InputError(f"{self.path} was truncated while it was read; restore it")
            piece[:] = np.frombuffer(data, self.dtype)
            first += len(piece)


def encode_header(dtype: np.dtype, tokens: int) -> bytes:
    """The header of a file with this many ids of UINT16 or UINT32."""
    magic, version = next(header[:2] for header in HEADERS if header.dtype == dtype)
    numbers = np.zeros(HEADER_BYTES // 4, "<i4")
    numbers[:3] = magic, version, tokens
    return numbers.tobytes()


def dtype_for(vocab_size: int) -> np.dtype:
    """The smaller of the two types that holds every id below vocab_size."""
    return UINT16 if vocab_size <= 2**16 else UINT32


def _read_at(file: int, nbytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(file, nbytes, offset)
    with _seeking:  # on Windows, where threads share the place in an open file
        os.lseek(file, offset, os.SEEK_SET)
        return os.read(file, nbytes)


@contextmanager
def _explained(path: str | PathLike[str]) -> Iterator[None]:
    """Turns errors about the file within the block into a one-line InputError."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a token file") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is not a valid token file: {error}") from None


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
    for header in HEADERS:
        if header.magic == magic:
            _check_header(header, start, size)
            return header.dtype, HEADER_BYTES
    dtype = _type_without_header(path)
    if size % dtype.itemsize:
        raise ValueError(f"its {size:,} bytes are not a whole number of {dtype.name} ids")
    return dtype, 0


def _check_header(header: Header, start: bytes, size: int) -> None:
    """ValueError unless the header fits the size of its file."""
    if len(start) < HEADER_BYTES:
        raise ValueError(f"it ends within its header: {size:,} of {HEADER_BYTES:,} bytes")
    _, version, tokens = np.frombuffer(start, "<i4", 3).tolist()
    if version != header.version:
        raise ValueError(f"it has version {version}; version {header.version} is read")
    if tokens < 1:
        raise ValueError(f"its header announces {tokens:,} tokens")
    expected = HEADER_BYTES + tokens * header.dtype.itemsize
    if size != expected:
        raise ValueError(
            f"its header announces {tokens:,} tokens, which take {expected:,} bytes; it has "
            f"{size:,}: copy it again"
        )


def _type_without_header(path: Path) -> np.dtype:
    """The type of the ids in a file that has no known header."""
    meta = path.with_name(META)
    if not os.path.lexists(meta):
        if path.name in NANOGPT:
            return UINT16
        raise InputError(
            f"{path} has no header of a token file; if it holds nothing but ids, put their type "
            f'into {META} beside it: {{"dtype": "uint16"}} or {{"dtype": "uint32"}}'
        )
    try:
        with durable.open_regular(meta) as file:
            fields = safetensors.from_json(file.read(MAX_META_BYTES))
    except OSError as error:
        raise InputError(f"cannot read {meta}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{meta} is not valid JSON: {error}") from None
    name = fields.get("dtype") if isinstance(fields, dict) else None
    for dtype in (UINT16, UINT32):
        if name == dtype.name:
            return dtype
    raise InputError(f"{meta}: dtype={shown_value(name)} must be uint16 or uint32")
