"""The GGUF file format, read and written: metadata by key, tensors by name, no code.

"GGUF", a version, the numbers of tensors and keys; then the metadata, each value with its type; a
name, sizes (the last one first), type and offset for each tensor; then the tensors, each from a
multiple of the alignment on. All little-endian.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import itertools
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from smallmind.checks import InputError, shown_value
from smallmind.exchange.tensors import encode
from smallmind.files import durable
from smallmind.kernels.number_types import DTYPES
from smallmind.nn.loading import Stored
from smallmind.parts import NUMBER_TYPES, NumberType

MAGIC = b"GGUF"
VERSION = 3
READ_VERSIONS = (2, 3)  # version 1 has shorter lengths
ALIGNMENT = 32
MAX_HEADER = 200_000_000  # bytes; a vocabulary of 256,000 tokens has 15,000,000
MAX_COUNT = 2**20  # tensors, keys, strings of an array
MAX_NAME = 63  # bytes
MAX_DIMENSIONS = 4
TYPES = {kind.gguf: kind for kind in NUMBER_TYPES.values()}
# Others, by number, to name them.
UNREAD = {16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 21: "iq3_s", 22: "iq2_s"}
UNREAD |= {28: "f64", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4"}
# Types of values in the metadata, by number; 7 is bool, 8 string, 9 array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
VALUE_TYPES = {
    np.dtype(np.uint8): 0,
    np.dtype(np.uint32): 4,
    np.dtype(np.int32): 5,
    np.dtype(np.float32): 6,
}
BOOL, STRING, ARRAY = 7, 8, 9


class TensorToWrite(NamedTuple):
    """A tensor to write: `values` returns it as float32 when its turn comes."""

    name: str
    shape: tuple[int, ...]
    type: NumberType
    values: Callable[[], np.ndarray]


def write(path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> None:
    """Writes metadata and tensors; an existing file is replaced completely or left as it was.

    Values are bool, str, lists of str, NumPy's uint32, int32 or float32, or arrays of these.
    OSError if the disk refuses the file.
    """
    durable.write(path, itertools.chain([_head(metadata, tensors)], _contents(tensors)))


def _head(metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> bytes:
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + _typed(value)
    offset = 0
    for tensor in tensors:
        assert len(tensor.name.encode()) <= MAX_NAME
        sizes = tensor.shape[::-1]
        head += _string(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", tensor.type.gguf, offset)
        offset += _aligned(tensor.type.size(tensor.shape))
    return bytes(head.ljust(_aligned(len(head)), b"\0"))


def _contents(tensors: Sequence[TensorToWrite]) -> Iterator[bytes | memoryview]:
    for tensor in tensors:
        stored = encode(tensor.values(), tensor.type)
        assert stored.nbytes == tensor.type.size(tensor.shape)
        yield stored.reshape(-1).view(np.uint8).data
        yield bytes(_aligned(stored.nbytes) - stored.nbytes)


def _typed(value: Any) -> bytes:
    """Returns a value behind the number of its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list):
        start = struct.pack("<IIQ", ARRAY, STRING, len(value))
        return start + b"".join(map(_string, value))
    number = VALUE_TYPES[value.dtype]
    if value.ndim == 0:
        return struct.pack("<I", number) + value.tobytes()
    return struct.pack("<IIQ", ARRAY, number, len(value)) + value.tobytes()


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return math.ceil(size / alignment) * alignment


def _read(path: Path, start: int, first: int, out: np.ndarray) -> None:
    """Reads rows of the tensor that starts there. The file is opened anew: it must not change."""
    stored = out.reshape(-1).view(np.uint8)
    with durable.explained(path, "GGUF file"), durable.open_regular(path) as file:
        file.seek(start + first * (stored.size // len(out)))
        count = file.readinto(stored.data)
    if count != stored.size:
        raise InputError(f"{path} was truncated while it was read; restore it")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """path -> metadata, tensors by name, in the order of the file. No tensor is read yet.

    InputError if the file is missing, malformed, or holds tensors of a type not supported.
    """
    with durable.explained(path, "GGUF file"), durable.open_regular(path) as file:
        return _Reader(path, file, os.fstat(file.fileno()).st_size).contents()


class _Reader:
    """Reads the start of a file, value by value, and never more than there is."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._position = 0

    def contents(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in READ_VERSIONS:
            shown = "that of a big-endian file" if version > 2**16 else version
            raise InputError(
                f"{self._path}: its version is {shown}; this version of smallmind reads 2 and 3"
            )
        n_tensors, n_keys = self._count(MAX_COUNT), self._count(MAX_COUNT)
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._string()
            if key in metadata:
                raise ValueError(f"the key {shown_value(key)} appears twice")
            metadata[key] = self._value(self._number("I"))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment % 8:
            raise ValueError("its alignment is not a multiple of 8")
        described = [self._tensor() for _ in range(n_tensors)]
        start = _aligned(self._position, alignment)
        tensors: dict[str, Stored] = {}
        end = 0
        for name, shape, kind, offset in described:
            if name in tensors:
                raise ValueError(f"the tensor {shown_value(name)} appears twice")
            if offset != end:  # as llama.cpp demands
                raise ValueError(f"the tensor {shown_value(name)} is not behind the one before it")
            size = kind.size(shape)
            if start + offset + size > self._size:
                raise ValueError(f"it ends within the tensor {shown_value(name)}")
            read = functools.partial(_read, self._path, start + offset)
            tensors[name] = Stored(shape, DTYPES[kind.name], read)
            end = offset + _aligned(size, alignment)
        return metadata, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], NumberType, int]:
        name = self._string()
        n_sizes = self._number("I")
        if not 1 <= n_sizes <= MAX_DIMENSIONS:
            raise ValueError(f"the tensor {shown_value(name)} has {n_sizes} dimensions")
        shape = tuple(self._number("Q") for _ in range(n_sizes))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = TYPES.get(number)
        if kind is None:
            raise InputError(
                f"{self._path}: the tensor {shown_value(name)} is of type "
                f"{UNREAD.get(number, number)}, which is not supported; use another file of this "
                f"model, with tensors in any of {', '.join(NUMBER_TYPES)}"
            )
        if not all(0 < size < 2**48 for size in shape) or not kind.fits(shape):
            raise ValueError(f"the tensor {shown_value(name)} has invalid sizes")
        return name, shape, kind, offset

    def _value(self, number: int) -> Any:
        if number == BOOL:
            value = self._number("B")
            if value > 1:
                raise ValueError("a bool is neither true nor false")
            return bool(value)
        if number == STRING:
            return self._string()
        if number in NUMBERS:
            value = self._number(NUMBERS[number])
            # As it was written, such as 1e-06, not 9.999999974752427e-07.
            return float(str(np.float32(value))) if NUMBERS[number] == "f" else value
        if number != ARRAY:
            raise ValueError(f"a value is of the unknown type {number}")
        inner = self._number("I")
        if inner == STRING:
            return self._strings(self._count(min(MAX_COUNT, self._left() // 8)))
        if inner not in NUMBERS and inner != BOOL:
            raise ValueError(f"an array is of type {inner}, which is not supported")
        dtype = np.dtype("?" if inner == BOOL else f"<{NUMBERS[inner]}")
        count = self._count(self._left() // dtype.itemsize)
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        read, left, texts = self._file.read, self._left(), []
        for _ in range(count):  # hundreds of thousands: tokens and merges
            size = int.from_bytes(read(8), "little")
            left -= 8 + size
            if left < 0:
                raise ValueError(f"it ends within a string of {size:,} bytes")
            texts.append(read(size).decode("utf-8"))
        self._position += self._left() - left
        return texts

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))
        return value

    def _count(self, most: int) -> int:
        count = int.from_bytes(self._bytes(8), "little")
        if count > most:
            raise ValueError(f"it claims {count:,} items, which is impossible")
        return count

    def _left(self) -> int:
        return min(self._size, MAX_HEADER) - self._position

    def _bytes(self, count: int) -> bytes:
        if count > self._left():
            raise ValueError(
                "it is truncated"
                if count > self._size - self._position
                else f"its header has more than {MAX_HEADER:,} bytes"
            )
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError("it was truncated while it was read")
        self._position += count
        return data
