"""Compressed files and zip archives, read piece by piece, refused if they expand beyond reason."""

import bz2
import gzip
import importlib
import io
import lzma
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import PurePosixPath
from typing import IO, Any, cast

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.entry import (
    SMALL,
    Entry,
    Piece,
    Stream,
    may_have_turns,
    read,
    read_found,
    small_text,
)
from smallmind.corpus.reading import FileStream, Limits, Skipped, Unusable, shown

BYTES_PER_READ = 2**16  # bytes that are read at once
XZ_MEMORY = 2**28  # bytes: `xz -9` needs 65 MiB, a hostile header may ask for gigabytes
# Flags of a member of a zip archive: for its name, and those that change nothing here.
ENCRYPTED_FLAG, UTF8_FLAG, USUAL_FLAGS = 1, 0x800, 0x80E
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
        # A file in an archive expands the archive, too.
        self._outer: Expansion | None = getattr(packed, "outer", None)
        self._start, self._count = packed.count, 0

    def add(self, count: int) -> None:
        """Counts bytes that were unpacked. InputError if they are too many."""
        self._count += count
        if self._outer:
            self._outer.add(count)
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
        self._name, self._read, self.expansion, self.close = name, read, expansion, close
        self.count = 0

    def read(self, size: int, /) -> bytes:
        with _explaining(self._name):
            data = self._read(size)
        self.count += len(data)
        self.expansion.add(len(data))
        return data


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    """Turns errors of a damaged file within the block into a one-line InputError."""
    try:
        yield
    except InputError:
        raise
    except (*DAMAGE_ERRORS, getattr(_zstd(), "ZstdError", OSError)) as error:
        reason = shown(error).rstrip(".") or type(error).__name__
        raise InputError(
            f"{name} is damaged or incomplete: {reason}; download or copy it again"
        ) from None


class Held(io.BytesIO):
    """The bytes of a stream in memory. InputError if they are too many."""

    def __init__(self, entry: Entry, stream: Stream | io.BytesIO) -> None:
        longest = entry.reading.limits.whole
        while block := stream.read(BYTES_PER_READ):
            self.write(block)
            if self.tell() > longest:
                reason = f"{entry.name} has more than {longest:,} bytes"
                raise InputError(f"{reason}; convert it to text, or leave it out")
        self.count = self.tell()
        self.seek(0)
        self.outer = getattr(stream, "expansion", None)


def read_packed(entry: Entry) -> Iterator[Piece]:
    """Returns the documents in a compressed file."""
    return read(unpacked(entry))


@cache
def _zstd() -> Any:
    """Returns the module for zstd, which Python has from 3.14 on; None if there is none."""
    for name in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            return importlib.import_module(name)
    return None


def unpacked(entry: Entry) -> Entry:
    """Returns the contents of a file, whose suffix is in PACKED. Unusable if nothing unpacks it."""
    if entry.suffix == ".zst" and _zstd() is None:
        advice = 'to read it: pip install "smallmind[zst]"'
        raise Unusable(entry.name, "is compressed with zstd", advice)

    def open() -> Stream:
        packed = entry.open()
        expansion = Expansion(entry.name, packed, entry.reading.limits)
        return UnpackedStream(entry.name, PACKED[entry.suffix](packed), expansion, packed.close)

    return entry.unpacked(open)


class _Decompressed:
    """Reads what bz2, lzma or zstd decompress; several compressed files may follow one another.

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
    # At most 128 MiB of memory, the default of zstd.
    ".zst": lambda stream: _Decompressed(stream, _zstd().ZstdDecompressor).read,
}


def read_zip(entry: Entry) -> Iterator[Piece]:
    """Yields the documents in a zip archive. InputError if it is damaged, or may do harm."""
    reading = entry.reading
    with opened_zip(entry) as members:
        for member, opened, load in members:
            # Not is_dir(), which fails for an empty name.
            file, is_glance = member.filename, reading.is_glance
            if file.endswith("/") or _is_hidden(file) or (is_glance and not may_have_turns(file)):
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                reading.skipped.append(Skipped(opened().name, "is a symbolic link"))
                continue
            if text := small_text(file, reading, load):
                yield Piece(text, True)
            else:
                yield from read_found(opened())


Member = tuple[zipfile.ZipInfo, Callable[[], Entry], Callable[[], bytes | None]]


@contextmanager
def opened_zip(entry: Entry) -> Iterator[Iterator[Member]]:
    """Opens a zip archive -> each member, what opens it, and what reads a small one at once.

    InputError if the archive is damaged, or may do harm.
    """
    with opened_file(entry) as file:
        with _explaining(entry.name):
            archive = zipfile.ZipFile(cast(IO[bytes], file))
        members = archive.infolist()
        for member in members:
            activity.tick()
            _check(entry, member)
        # Members that share their bytes are how a small archive becomes petabytes.
        if sum(member.compress_size for member in members) > file.seek(0, io.SEEK_END):
            raise InputError(f"{entry.name} has members that overlap; pack its files again")
        expansion = Expansion(entry.name, file, entry.reading.limits)
        yield (
            (
                member,
                partial(_member, entry, archive, member, expansion),
                partial(_small_bytes, archive, member, expansion),
            )
            for member in members
        )


@contextmanager
def opened_file(entry: Entry) -> Iterator[FileStream | Held]:
    """Opens a file to be read in any order; one that is packed is held in memory."""
    with closing(entry.open()) as stream:
        yield stream if isinstance(stream, FileStream) else Held(entry, stream)


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

    name = shown(member.filename)
    return Entry(f"{entry.name}: {name}", name, open, entry.reading, False, None, beside=beside)


def _small_bytes(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, expansion: Expansion
) -> bytes | None:
    """Unpacks a small member at once, in a tenth of the time of its stream; None if it is odd."""
    file, size = archive.fp, member.compress_size
    if member.flag_bits & ~USUAL_FLAGS or not file or max(size, member.file_size) >= SMALL:
        return None
    try:
        name = member.orig_filename.encode("utf-8" if member.flag_bits & UTF8_FLAG else "cp437")
        file.seek(member.header_offset)
        mark, _, named, more = struct.unpack("<4s22s2H", file.read(30).ljust(30))
        data = file.read(named + more + size)
        if mark != b"PK\3\4" or data[:named] != name:
            return None
        data = data[named + more :]
        if member.compress_type == zipfile.ZIP_DEFLATED:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, SMALL)
    except (OSError, UnicodeError, zlib.error):
        return None
    if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
        return None
    expansion.add(len(data))
    return data
