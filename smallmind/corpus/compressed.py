"""Compressed files and zip archives, read piece by piece, refused if they expand beyond reason."""

import bz2
import gzip
import lzma
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import IO, cast

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.entry import Entry, Piece, Stream, read, read_found
from smallmind.corpus.reading import FileStream, Limits, Skipped, shown

BYTES_PER_READ = 2**16  # bytes that are read at once
XZ_MEMORY = 2**28  # bytes: `xz -9` needs 65 MiB, a hostile header may ask for gigabytes
ENCRYPTED_FLAG = 1  # flag of a member of a zip archive
# Other methods unpack a block at once, however much comes out of it.
KNOWN_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OUTSIDE_PATH = re.compile(r"[\\/]|[A-Za-z]:|(.*[\\/])?\.\.([\\/]|$)", re.DOTALL)
# The standard library raises these for damaged files and for contradictory headers.
DAMAGE_ERRORS = (
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


class Expansion:
    """Counts the bytes that are really unpacked, whatever headers say; refuses too many of them."""

    def __init__(self, name: str, packed: Stream, limits: Limits) -> None:
        self._name, self._packed, self._limits = name, packed, limits
        self._start, self._count = packed.count, 0

    def add(self, count: int) -> None:
        """Counts bytes that were unpacked. InputError if they are too many."""
        self._count += count
        ratio = self._limits.ratio
        allowed = max(self._limits.unpacked, ratio * (self._packed.count - self._start))
        if self._count > allowed:
            raise InputError(
                f"{self._name} expands more than {ratio}-fold (a decompression bomb?); unpack it "
                "yourself if you trust it"
            )


class UnpackedStream:
    """The contents of a compressed file. InputError if it is damaged or too large."""

    def __init__(
        self,
        name: str,
        read: Callable[[int], bytes],
        expansion: Expansion,
        close: Callable[[], None],
    ) -> None:
        self._name, self._read, self._expansion, self.close = name, read, expansion, close
        self.count = 0

    def read(self, size: int, /) -> bytes:
        with _explaining(self._name):
            data = self._read(size)
        self.count += len(data)
        self._expansion.add(len(data))
        return data


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    """Turns errors of a damaged file within the block into a one-line InputError."""
    try:
        yield
    except InputError:
        raise
    except DAMAGE_ERRORS as error:
        reason = shown(error).rstrip(".") or type(error).__name__
        raise InputError(
            f"{name} is damaged or incomplete: {reason}; download or copy it again"
        ) from None


def read_packed(entry: Entry) -> Iterator[Piece]:
    """Returns the documents in a file compressed with gzip, bzip2 or xz."""
    return read(unpacked(entry))


def unpacked(entry: Entry) -> Entry:
    """Returns the contents of a compressed file, whose suffix is one of PACKED."""

    def open() -> Stream:
        packed = entry.open()
        expansion = Expansion(entry.name, packed, entry.reading.limits)
        return UnpackedStream(entry.name, PACKED[entry.suffix](packed), expansion, packed.close)

    return entry.unpacked(open)


class _Decompressed:
    """Reads what bz2 or lzma decompress; several compressed files may follow one another.

    BZ2File and LZMAFile would ignore whatever follows the first, and LZMAFile takes no limit of
    memory.
    """

    def __init__(
        self, stream: Stream, make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
    ) -> None:
        self._stream, self._make = stream, make
        self._decompressor = make()
        self._rest = b""  # compressed bytes that no decompressor has had

    def read(self, size: int, /) -> bytes:
        """Returns as many bytes as asked for, except at the end."""
        data = bytearray()
        while len(data) < size and self._has_more():
            block = b""
            if self._decompressor.needs_input:
                block = self._rest or self._stream.read(BYTES_PER_READ)
                self._rest = b""
                if not block:
                    raise EOFError("it ends too early")
            data += self._decompressor.decompress(block, size - len(data))
        return bytes(data)

    def _has_more(self) -> bool:
        """Returns True if more data follows, perhaps in another compressed file, after zeros."""
        if not self._decompressor.eof:
            return True
        rest = self._decompressor.unused_data.lstrip(b"\0")
        while not rest:
            if not (block := self._stream.read(BYTES_PER_READ)):
                return False
            rest = block.lstrip(b"\0")
        self._decompressor, self._rest = self._make(), rest
        return True


# By the suffix of a file, what reads its unpacked bytes from a stream.
PACKED: dict[str, Callable[[Stream], Callable[[int], bytes]]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=cast(IO[bytes], stream)).read,
    ".bz2": lambda stream: _Decompressed(stream, bz2.BZ2Decompressor).read,
    ".xz": lambda stream: (
        _Decompressed(stream, partial(lzma.LZMADecompressor, memlimit=XZ_MEMORY)).read
    ),
}


def read_zip(entry: Entry) -> Iterator[Piece]:
    """Yields the documents in a zip archive. InputError if it is damaged, or may do harm."""
    with closing(cast(FileStream, entry.open())) as file:  # never inside another file
        with _explaining(entry.name):
            archive = zipfile.ZipFile(cast(IO[bytes], file))
        members = archive.infolist()
        for member in members:
            activity.tick()
            _check(entry, member)
        # Members that share their bytes are how a small archive becomes petabytes.
        if sum(member.compress_size for member in members) > file.size():
            raise InputError(f"{entry.name} has members that overlap; pack its files again")
        expansion = Expansion(entry.name, file, entry.reading.limits)
        for member in members:
            # Not is_dir(), which fails for an empty name.
            if not member.filename.endswith("/") and not _is_hidden(member.filename):
                yield from _read_member(entry, archive, member, expansion)


def _check(entry: Entry, member: zipfile.ZipInfo) -> None:
    """Raises InputError for a member that no honest archive has, or that cannot be read."""
    name = shown(member.orig_filename)
    if OUTSIDE_PATH.match(member.orig_filename):
        raise InputError(
            f"{entry.name} has a member {name!r}, outside the folder of the archive; "
            "refusing it: such paths are used to overwrite files"
        )
    if member.flag_bits & ENCRYPTED_FLAG:
        raise InputError(f"{entry.name} is encrypted; unpack it and give the files in it")
    if member.compress_type not in KNOWN_METHODS:
        raise InputError(
            f"{entry.name}: {name} is not compressed with deflate, as is usual; unpack the "
            "archive and give the files in it"
        )


def _is_hidden(name: str) -> bool:
    return any(part[:1] == "." != part or part == "__MACOSX" for part in name.split("/"))


def _read_member(
    entry: Entry, archive: zipfile.ZipFile, member: zipfile.ZipInfo, expansion: Expansion
) -> Iterator[Piece]:
    opened = _member(entry, archive, member, expansion)
    if stat.S_ISLNK(member.external_attr >> 16):
        entry.reading.skipped.append(Skipped(opened.name, "is a symbolic link"))
    else:
        yield from read_found(opened)


def _member(
    entry: Entry, archive: zipfile.ZipFile, member: zipfile.ZipInfo, expansion: Expansion
) -> Entry:
    def open() -> Stream:
        with _explaining(entry.name):
            inner = archive.open(member)
        return UnpackedStream(entry.name, inner.read, expansion, inner.close)

    def beside(name: str) -> Entry | None:
        found = archive.NameToInfo.get(str(PurePosixPath(member.filename).parent.parent / name))
        return _member(entry, archive, found, expansion) if found else None

    return entry.member(shown(member.filename), open, beside)
