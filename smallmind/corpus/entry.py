"""The input and output of a reader, and the choice of the reader for a file."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from smallmind import parts
from smallmind.corpus.reading import FileStream, Reading, Skipped, Unusable, shown

TEXT = ".txt"
NESTED = (".gz", ".bz2", ".xz", ".zip", ".parquet")  # not read inside a compressed file
OF_RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# Archives that have no reader: some of them would pass as text.
UNKNOWN_ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar", ".zst")


class Piece(NamedTuple):
    """Some of the text of a document: never empty, unless it is a whole turn of a conversation."""

    text: str
    ends: bool  # whether the document ends here
    role: str = ""  # of a turn; empty for plain documents
    where: str = ""  # the file and the record of a turn, in words


class Stream(Protocol):
    """Bytes that are read from the first to the last."""

    count: int  # how many have been read

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, fewer only at the end. InputError if they cannot be had."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Entry:
    """A file, its unpacked content or a member of an archive: the input of a reader."""

    name: str  # in messages
    file: str  # name of a file, whose suffix says how to read it
    open: Callable[[], Stream]  # may be called again, to read from the beginning
    reading: Reading
    is_named: bool  # by the user, rather than found in a folder
    size: int | None  # bytes; None where only a header would say it

    @classmethod
    def of_file(cls, path: Path, reading: Reading, is_named: bool, size: int) -> "Entry":
        """A file of this many bytes."""
        return cls(
            shown(path), path.name, lambda: FileStream(path, reading), reading, is_named, size
        )

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.file)[1].lower()

    @property
    def is_unpacked(self) -> bool:
        """True if the source comes out of a compressed file or an archive."""
        return self.size is None

    def unpacked(self, open: Callable[[], Stream]) -> "Entry":
        """The uncompressed entry; its name lacks the suffix."""
        file = os.path.splitext(self.file)[0]
        return dataclasses.replace(self, file=file, open=open, size=None)

    def member(self, file: str, open: Callable[[], Stream]) -> "Entry":
        """A file in this archive."""
        name = f"{self.name}: {file}"
        return dataclasses.replace(self, name=name, file=file, open=open, is_named=False, size=None)


Reader = Callable[[Entry], Iterator[Piece]]


def read(entry: Entry) -> Iterator[Piece]:
    """The documents in an entry.

    Unusable if nothing can be had from it, InputError if it is damaged.
    """
    if entry.size == 0:
        raise Unusable(entry.name, "is empty", "give a file with text in it")
    suffix = entry.suffix
    if suffix in UNKNOWN_ARCHIVES:
        raise Unusable(entry.name, f"is a {suffix} archive", "unpack it and give the files in it")
    if entry.is_unpacked and suffix in NESTED:
        reason = f"is a {suffix} file inside a compressed file"
        raise Unusable(entry.name, reason, "unpack the outer one first")
    if entry.reading.is_glance and suffix not in (*OF_RECORDS, *NESTED):
        return
    reader: Reader = parts.load(parts.READERS, suffix if suffix in parts.READERS else TEXT)
    has_text, unanswered = False, entry.reading.unanswered
    for piece in reader(entry):
        has_text = True
        yield piece
        if entry.reading.is_glance and suffix in OF_RECORDS:
            return
    if not has_text and entry.reading.unanswered > unanswered:
        reason = "has no conversation with an answer"
        raise Unusable(entry.name, reason, "the assistant must say something in one of them")
    if not has_text and not entry.reading.is_glance:
        raise Unusable(entry.name, "has no text in it", "give a file with text in it")


def read_found(entry: Entry) -> Iterator[Piece]:
    """The documents in an entry that nobody named: it is skipped if it is unusable.

    InputError if that shows only after documents were read from it.
    """
    has_text = False
    try:
        for piece in read(entry):
            has_text = True
            yield piece
    except Unusable as error:
        if has_text:
            raise
        entry.reading.skipped.append(Skipped(entry.name, error.reason))


def document(chunks: Iterable[str], size: int) -> Iterator[Piece]:
    """The chunks of one document, which may be empty, in pieces of at most `size` characters."""
    last = ""
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            if last:
                yield Piece(last, ends=False)
            last = chunk[start : start + size]
    if last:
        yield Piece(last, ends=True)
