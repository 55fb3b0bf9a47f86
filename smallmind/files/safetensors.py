"""The safetensors file format, read and written: tensors by name, no code.

Eight bytes of header length (little-endian), a JSON header with the dtype, shape and offsets of
every tensor and a string map `__metadata__`, then the tensors' bytes.
Format: https://github.com/huggingface/safetensors, "Format".

`write` adds a SHA-256 to the metadata, taken over the whole file with the 64 digits of the digest
itself as zeros. `read` checks it; files from other writers may lack one. Long texts of the metadata
are kept behind the tensors, as tensors of bytes: the header stays short.
"""

import hashlib
import itertools
import json
import math
import mmap
import os
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader, FileIO
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.checks import from_json as from_json
from smallmind.console import activity
from smallmind.files import compression, durable
from smallmind.files.safetensors_header import MAX_HEADER, read_header

# NumPy has no bfloat16. Its two bytes get a dtype of their own, so that they are not mistaken for
# integers: `bits.view(BFLOAT16)` is written as BF16, and a tensor read back has `.view(np.uint16)`.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])
DTYPES: dict[str, Any] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": BFLOAT16,
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS = 32
BLANK = "0" * 64
PIECE = 2**16  # bytes, of a file that may be larger than memory
DIGEST = "smallmind.sha256"
# A second mark, so that damage to the first cannot pass a file off as another writer's.
DIGEST_OF = "smallmind.sha256.of"
DIGEST_NOTE = "this file with the digits of its SHA-256 as zeros"
KIND = "safetensors file"
# Says that every tensor is compressed, and in which format: `read` gives back the tensors.
COMPRESSED = "smallmind.compressed"
COMPRESSED_FORMAT = "1"
TEXT = "smallmind.text."  # the prefix of the names of long texts, as tensors
SHORT_TEXT = 2**17  # bytes of UTF-8 that the header holds
MAX_TEXT = 2**25  # bytes: a tokenizer of 128,000 tokens and 280,000 merges takes 5,000,000


class LazyTensors(Mapping[str, np.ndarray]):
    """Tensors by name, each of which is made when it is asked for."""

    def __init__(self, names: Collection[str], make: Callable[[str], np.ndarray]) -> None:
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> np.ndarray:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Unread(NamedTuple):
    """A tensor that is read, or made, when its turn comes to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class _Entry(NamedTuple):
    """A tensor in the header. Sorts by offset."""

    begin: int
    end: int
    name: str
    dtype: np.dtype
    shape: list[int]


def write(
    path: str | PathLike[str],
    tensors: Mapping[str, np.ndarray | Unread],
    metadata: Mapping[str, str],
    announce: Callable[[str], object] | None = None,
) -> None:
    """Writes tensors and metadata; an existing file is replaced completely or left as it was.

    `announce` gets the SHA-256 of the file before it is replaced. InputError for what the format
    cannot hold, OSError if the disk refuses the file.
    """
    tensors, metadata = _with_texts(tensors, metadata)
    head = _encode(tensors, metadata)
    digest = hashlib.sha256()

    def start() -> bytes:
        if announce:
            announce(digest.hexdigest())
        return head.replace(BLANK.encode(), digest.hexdigest().encode(), 1)

    with ThreadPoolExecutor(1) as thread:

        def pieces() -> Iterator[bytes | memoryview]:
            first: list[bytes | memoryview] = [head]
            for piece in itertools.chain(first, _pieces(tensors)):
                added = _started(thread, digest.update, piece)
                yield piece  # written meanwhile
                added.result()

        durable.write(path, pieces(), start)


def compressed(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """-> tensors and metadata to be written instead, from which `read` returns the given ones.

    Other programs can open such a file, but they find compressed bytes there.
    """
    _encode(tensors, metadata)  # refuses what cannot be written
    packed = {}
    for name, tensor in tensors.items():
        packed[name] = compression.compress(tensor, NAMES[tensor.dtype])
    return packed, {**metadata, COMPRESSED: COMPRESSED_FORMAT}


def check(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Raises InputError if `write` would refuse these, whatever the path."""
    _encode(*_with_texts(tensors, metadata))


def read(
    path: str | PathLike[str], strict: bool = False
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """path -> tensors in the order of the file, metadata.

    InputError if the file is missing, malformed or does not match its SHA-256; with strict=True
    also if it has no digest or is a symbolic link. Peak memory is that of the tensors, each a
    separate array, and of the file if it is compressed.
    """
    # Not mapped: a mapped file can change after its digest was checked, and if it is truncated
    # meanwhile, the process dies of SIGBUS.
    with durable.explained(path, KIND), durable.open_regular(path, follow=not strict) as file:
        before = os.fstat(file.fileno())
        head, entries, metadata = _read_head(file, before.st_size)
        digits = _pop_digest(metadata, strict)
        digest = hashlib.sha256(head.replace(digits.encode(), BLANK.encode(), 1))
        tensors = {}
        with activity.doing(f"Reading {path}", usual=before.st_size < activity.LARGE):
            for entry in activity.parts(entries):
                tensors[entry.name] = _read_tensor(file, entry)
                if digits:
                    digest.update(_bytes(tensors[entry.name]))
        _check_unchanged(before, os.fstat(file.fileno()))
        _check_digest(digest.hexdigest(), digits)
        for entry in _texts(entries):
            _add_text(metadata, entry, tensors.pop(entry.name))
        if _pop_compressed(metadata):
            for name in tensors:
                tensors[name] = compression.decompress(tensors[name], DTYPES)
    return tensors, metadata


def _started(thread: Executor, call: Callable[..., None], *arguments: Any) -> Future[None]:
    """Calls it by a thread, or at once while the interpreter ends, which starts no more threads."""
    try:
        return thread.submit(call, *arguments)
    except RuntimeError:
        call(*arguments)
        done = Future[None]()
        done.set_result(None)
        return done


class _FileDigest:
    """The SHA-256 of a file that is read from its start to its end.

    Large pieces are added by a thread of its own, while they are used.
    """

    def __init__(self, file: BufferedReader, position: int, thread: Executor) -> None:
        self.sha256 = hashlib.sha256()
        self._thread, self._added = thread, Future[None]()
        self._added.set_result(None)
        # Not through the buffer: stored tensors move the offset, which their descriptors share.
        self._file = FileIO(file.fileno(), closefd=False)
        self._position = position

    def add(self, data: memoryview) -> None:
        """Adds what has been read where `reach` ended; it must not change until the next call."""
        self._added.result()
        self._position += len(data)
        if len(data) < PIECE:
            self.sha256.update(data)
        else:
            self._added = _started(self._thread, self.sha256.update, data)

    def reach(self, position: int) -> None:
        """Adds everything up to there. Moves the file's position."""
        assert position >= self._position  # tensors are read in order
        self._added.result()
        self._file.seek(self._position)
        while count := min(PIECE, position - self._position):
            piece = self._file.read(count)
            if not piece:
                raise ValueError("it was truncated while it was read")
            self.add(memoryview(piece))
        self._added.result()


class StoredTensor:
    """A tensor in a file that stays open, whose rows are read on demand.

    Not mapped: if the file is truncated, a mapping ends the process with SIGBUS.
    """

    def __init__(
        self,
        file: BufferedReader,
        path: str | PathLike[str],
        entry: _Entry,
        start: int,
        digest: _FileDigest | None = None,
    ) -> None:
        self._digest = digest
        self.shape = tuple(entry.shape)
        self.dtype = entry.dtype
        self._start = start + entry.begin
        self._path = path
        descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, descriptor)
        self._file = FileIO(descriptor, closefd=False)

    def read(self) -> np.ndarray:
        """Returns the whole tensor, a new array. InputError if it is gone."""
        tensor = np.empty(self.shape, self.dtype)
        if tensor.size:
            self._read(self._start, _bytes(tensor))
        return tensor

    def read_rows(self, first: int, out: np.ndarray) -> None:
        """Reads rows from number `first` on into out, C-contiguous. InputError if they are gone."""
        data = _bytes(out)
        start = self._start + first * (len(data) // len(out))
        if self._digest:
            self._digest.reach(start)
        self._read(start, data)
        if self._digest:
            self._digest.add(data)

    def _read(self, start: int, rest: memoryview) -> None:
        self._file.seek(start)
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise InputError(f"{self._path} was truncated while it was read; restore it")
            rest = rest[count:]


def open_tensors(
    path: str | PathLike[str], strict: bool = True
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Opens a file larger than memory: rows are read as they are used.

    The file must not be modified meanwhile; `write` does not modify files, it replaces them.
    """
    with durable.explained(path, KIND), durable.open_regular(path, follow=not strict) as file:
        before = os.fstat(file.fileno())
        head, entries, metadata = _read_head(file, before.st_size)
        if digits := _pop_digest(metadata, strict):
            digest = hashlib.sha256(head.replace(digits.encode(), BLANK.encode(), 1))
            with activity.doing(f"Reading {path}", usual=before.st_size < activity.LARGE):
                while piece := file.read(PIECE):
                    digest.update(piece)
                    activity.tick()
            _check_digest(digest.hexdigest(), digits)
        _check_unchanged(before, os.fstat(file.fileno()))
        if _pop_compressed(metadata):
            raise ValueError("its tensors are compressed, and cannot be read row by row")
        tensors = {entry.name: StoredTensor(file, path, entry, len(head)) for entry in entries}
        for entry in _texts(entries):
            _add_text(metadata, entry, tensors.pop(entry.name).read())
    return tensors, metadata


@contextmanager
def streaming(
    path: str | PathLike[str],
) -> Iterator[tuple[Mapping[str, np.ndarray | StoredTensor], dict[str, str]]]:
    """Reads rows within the block, on demand: each once, and in order.

    The digest is checked at the end of the block: InputError, and what was read must not be used.
    The tensors of a compressed file are arrays.
    """
    with (
        durable.explained(path, KIND),
        durable.open_regular(path) as file,
        ThreadPoolExecutor(1) as thread,
    ):
        before = os.fstat(file.fileno())
        head, entries, metadata = _read_head(file, before.st_size)
        if COMPRESSED in metadata:
            yield read(path)
            return
        digits = _pop_digest(metadata, strict=False)
        digest = _FileDigest(file, len(head), thread) if digits else None
        tensors = {}
        for entry in entries:
            tensors[entry.name] = StoredTensor(file, path, entry, len(head), digest)
        for entry in _texts(entries):
            _add_text(metadata, entry, tensors.pop(entry.name).read())
        if digest:
            digest.sha256.update(head.replace(digits.encode(), BLANK.encode(), 1))
        yield tensors, metadata
        if digest:
            digest.reach(before.st_size)
            _check_digest(digest.sha256.hexdigest(), digits)
        _check_unchanged(before, os.fstat(file.fileno()))


def release_pages(mapped: np.ndarray) -> None:
    """Unloads the pages of a read-only mapping, until they are used again."""
    data: Any = mapped
    while isinstance(data, np.ndarray | memoryview):
        data = data.base if isinstance(data, np.ndarray) else data.obj
    if isinstance(data, mmap.mmap) and hasattr(data, "madvise"):  # not on Windows
        data.madvise(mmap.MADV_DONTNEED)


def read_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """Returns the metadata alone, fast for a file of any size; the digest is not checked."""
    with durable.explained(path, KIND), durable.open_regular(path) as file:
        head, entries, metadata = _read_head(file, os.fstat(file.fileno()).st_size)
        _pop_digest(metadata, strict=False)
        for entry in _texts(entries):
            file.seek(len(head) + entry.begin)
            _add_text(metadata, entry, _read_tensor(file, entry))
        _pop_compressed(metadata)
    return metadata


def read_digest(path: str | PathLike[str]) -> str:
    """-> the SHA-256 that a file holds of itself, which is not checked; empty if it has none."""
    with durable.explained(path, KIND), durable.open_regular(path) as file:
        metadata = _read_head(file, os.fstat(file.fileno()).st_size)[2]
        return _pop_digest(metadata, strict=False)


def _read_head(file: BufferedReader, size: int) -> tuple[bytes, list[_Entry], dict[str, str]]:
    """-> length and header as in the file, the tensors by offset, the metadata."""
    head, header = read_header(file, size)
    metadata = header.pop("__metadata__", {})
    if not _are_texts(metadata):
        raise ValueError("its metadata is not strings by name")
    return head, _entries(header, size - len(head)), metadata


def _check_digest(found: str, digits: str) -> None:
    if digits and found != digits:
        raise ValueError("it does not match its SHA-256: it is damaged or was changed")


def to_json(value: Any) -> str:
    """value -> JSON text. ValueError for NaN and infinities, which JSON lacks."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _with_texts(
    tensors: Mapping[str, np.ndarray | Unread], metadata: Mapping[str, str]
) -> tuple[Mapping[str, np.ndarray | Unread], dict[str, str]]:
    """-> tensors, the long texts of the metadata among them, and the rest of the metadata."""
    if any(name.startswith(TEXT) for name in tensors):
        raise InputError(f"names that begin with {TEXT} are reserved")
    short = dict(metadata)
    if not _are_texts(short):
        raise InputError("metadata must be strings by name")
    texts: dict[str, np.ndarray | Unread] = {}
    for name, text in metadata.items():
        if len(text) <= SHORT_TEXT // 4:
            continue
        encoded = text.encode("utf-8", "surrogatepass")  # paths may have halves of characters
        if len(encoded) > SHORT_TEXT:
            if len(encoded) > MAX_TEXT:
                raise InputError(f"{name} takes {len(encoded):,} bytes; at most {MAX_TEXT:,} fit")
            texts[TEXT + name] = np.frombuffer(encoded, np.uint8)
            del short[name]
    lazy: Any = tensors  # some make their tensors when they are asked for
    return ChainMap(texts, lazy), short  # texts come last


def _texts(entries: list[_Entry]) -> list[_Entry]:
    """-> the tensors that are long texts. ValueError if one is too long, or has another type."""
    texts = [entry for entry in entries if entry.name.startswith(TEXT)]
    for entry in texts:
        if entry.dtype != np.uint8 or len(entry.shape) != 1 or entry.end - entry.begin > MAX_TEXT:
            raise ValueError(f"{entry.name[:80]!a} is not a text of at most {MAX_TEXT:,} bytes")
    return texts


def _add_text(metadata: dict[str, str], entry: _Entry, text: np.ndarray) -> None:
    name = entry.name.removeprefix(TEXT)
    if name in metadata:
        raise ValueError(f"its metadata has {name[:80]!a} twice")
    metadata[name] = text.tobytes().decode("utf-8", "surrogatepass")


def _encode(tensors: Mapping[str, np.ndarray | Unread], metadata: Mapping[str, str]) -> bytes:
    """-> length and header, with 64 zeros in place of the digest."""
    if DIGEST in metadata or DIGEST_OF in metadata or "__metadata__" in tensors:
        raise InputError(f"{DIGEST}, {DIGEST_OF} and __metadata__ are reserved names")
    header: dict[str, Any] = {"__metadata__": {DIGEST: BLANK, DIGEST_OF: DIGEST_NOTE, **metadata}}
    begin = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise InputError(
                f"{name} is {tensor.dtype}, which the format lacks; convert it to one of "
                f"{', '.join(NAMES.values())}"
            )
        end = begin + math.prod(tensor.shape) * tensor.dtype.itemsize
        dtype, shape = NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header, ensure_ascii=True).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MAX_HEADER:
        raise InputError(
            f"names and metadata take {len(encoded):,} bytes; at most {MAX_HEADER:,} fit"
        )
    return len(encoded).to_bytes(8, "little") + encoded


def _pieces(tensors: Mapping[str, np.ndarray | Unread]) -> Iterator[memoryview]:
    """Yields the bytes of tensors; those of read-only mappings in pieces that are unloaded."""
    for tensor in tensors.values():
        if isinstance(tensor, Unread):
            tensor = tensor.read()
        data = _bytes(np.ascontiguousarray(tensor))
        if not isinstance(tensor, np.memmap) or tensor.mode != "r":  # changes would be lost
            yield data
            continue
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]
            release_pages(tensor)


def _bytes(tensor: np.ndarray) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(np.uint8).data


def _are_texts(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


def _pop_digest(metadata: dict[str, str], strict: bool) -> str:
    """Removes the digest from metadata -> its digits; empty if the writer added none."""
    digits, note = metadata.pop(DIGEST, ""), metadata.pop(DIGEST_OF, "")
    if not digits and (note or strict):
        raise ValueError("it has no SHA-256 of its contents")
    return digits


def _pop_compressed(metadata: dict[str, str]) -> bool:
    """Removes the mark of compressed tensors from metadata -> True if it was there."""
    found = metadata.pop(COMPRESSED, None)
    if found not in (None, COMPRESSED_FORMAT):
        raise ValueError(f"its tensors are compressed in format {found[:20]!a}, which is unknown")
    return found is not None


def _entries(header: dict[str, Any], size: int) -> list[_Entry]:
    """-> the tensors by offset. ValueError unless they fill `size` bytes without gap or overlap."""
    entries = sorted(_entry(name, described) for name, described in header.items())
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise ValueError("there are gaps or overlaps between its tensors")
        end = entry.end
    if end != size:
        raise ValueError(f"it holds {size} bytes of tensors; its header describes {end}")
    return entries


def _entry(name: str, described: Any) -> _Entry:
    shown = ascii(name[:80])
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {shown} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the dtype of tensor {shown} is not one of {', '.join(DTYPES)}")
    if not _are_sizes(shape, MAX_DIMENSIONS) or not _are_sizes(offsets, 2) or len(offsets) != 2:
        raise ValueError(f"tensor {shown} has an invalid shape or offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise ValueError(f"the offsets of tensor {shown} do not fit its shape")
    return _Entry(begin, end, name, np.dtype(DTYPES[dtype]), shape)


def _are_sizes(numbers: Any, max_count: int) -> bool:
    # The exact type: True is an int too.
    return (
        isinstance(numbers, list)
        and len(numbers) <= max_count
        and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    )


def _read_tensor(file: BufferedReader, entry: _Entry) -> np.ndarray:
    tensor = np.empty(entry.shape, entry.dtype)
    if file.readinto(_bytes(tensor)) != tensor.nbytes:
        raise ValueError("it was truncated while it was read")
    return tensor


def _check_unchanged(before: os.stat_result, after: os.stat_result) -> None:
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ValueError("it was changed while it was read; try again")
