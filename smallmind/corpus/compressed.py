"""Compressed files, unpacked piece by piece, and refused if they expand beyond reason."""

import bz2
import gzip
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Protocol, cast

from smallmind.checks import InputError
from smallmind.corpus.entry import Entry, Piece, Stream, read
from smallmind.corpus.reading import Limits, shown

BLOCK = 2**16  # bytes that are read at once
XZ_MEMORY = 2**28  # bytes: `xz -9` needs 65 MiB, a hostile header may ask for gigabytes
# The standard library raises these for damaged files and for contradictory headers.
DAMAGED = (
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


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Expansion:
    """Counts what is unpacked from a stream, and refuses too much of it.

    It counts bytes that were really read and written: what headers say may be false.
    """

    def __init__(self, name: str, packed: Stream, limits: Limits) -> None:
        self._name, self._packed, self._limits = name, packed, limits
        self._start, self._count = packed.count, 0

    def add(self, count: int) -> None:
        """So many bytes were unpacked. InputError if they are too many."""
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
        self, name: str, inner: Readable, expansion: Expansion, close: Callable[[], None]
    ) -> None:
        self._name, self._inner, self._expansion, self._close = name, inner, expansion, close
        self.count = 0

    def read(self, size: int, /) -> bytes:
        try:
            data = self._inner.read(size)
        except InputError:
            raise
        except DAMAGED as error:
            raise damaged(self._name, error) from None
        self.count += len(data)
        self._expansion.add(len(data))
        return data

    def close(self) -> None:
        self._close()


def damaged(name: str, error: Exception) -> InputError:
    """The error for a compressed file that cannot be unpacked."""
    reason = shown(error).rstrip(".") or type(error).__name__
    return InputError(f"{name} is damaged or incomplete: {reason}; download or copy it again")


def read_gzip(entry: Entry) -> Iterator[Piece]:
    """The documents in a file compressed with gzip."""
    return _read_unpacked(entry, lambda stream: gzip.GzipFile(fileobj=cast(IO[bytes], stream)))


def read_bzip2(entry: Entry) -> Iterator[Piece]:
    """The documents in a file compressed with bzip2."""
    return _read_unpacked(entry, lambda stream: _Decompressed(stream, bz2.BZ2Decompressor))


def read_xz(entry: Entry) -> Iterator[Piece]:
    """The documents in a file compressed with xz."""

    def decompressor() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    return _read_unpacked(entry, lambda stream: _Decompressed(stream, decompressor))


def _read_unpacked(entry: Entry, unpack: Callable[[Stream], Readable]) -> Iterator[Piece]:
    def open() -> Stream:
        packed = entry.open()
        expansion = Expansion(entry.name, packed, entry.reading.limits)
        return UnpackedStream(entry.name, unpack(packed), expansion, packed.close)

    return read(entry.unpacked(open))


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
        """As many bytes as asked for, except at the end."""
        data = bytearray()
        while len(data) < size and self._has_more():
            block = b""
            if self._decompressor.needs_input:
                block = self._rest or self._stream.read(BLOCK)
                self._rest = b""
                if not block:
                    raise EOFError("it ends too early")
            data += self._decompressor.decompress(block, size - len(data))
        return bytes(data)

    def _has_more(self) -> bool:
        """True if more data follows, perhaps in another compressed file, after zeros."""
        if not self._decompressor.eof:
            return True
        rest = self._decompressor.unused_data.lstrip(b"\0")
        while not rest:
            if not (block := self._stream.read(BLOCK)):
                return False
            rest = block.lstrip(b"\0")
        self._decompressor, self._rest = self._make(), rest
        return True
