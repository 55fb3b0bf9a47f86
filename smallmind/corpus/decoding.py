"""Bytes to characters: the encoding of a file, and errors that name the one it probably has."""

import codecs
import itertools
import re
from collections.abc import Iterator
from contextlib import closing
from encodings.aliases import aliases

from smallmind.checks import InputError, nearest
from smallmind.console import activity
from smallmind.corpus.reading import Unusable, shown
from smallmind.corpus.source import Piece, Source, Stream, document
from smallmind.text.encoding import MARKS, advice, likely_encoding, unmarked_utf16

HEAD = 4096  # bytes in which a file may say its encoding
KIND = re.compile("it is (.+?)([:;]) (.+)")  # advice that knows what a file is
# Python has codecs of these names, which are not encodings of files.
NOT_OF_FILES = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")


def check_encoding(name: str) -> None:
    """InputError for the name of an unknown encoding, with the most similar known one."""
    if not _is_known(name):
        known = [
            word.replace("_", "-") for word in {*aliases, *aliases.values()} if _is_known(word)
        ]
        similar = nearest(name.lower(), sorted(known))
        raise InputError(f"encoding={shown(repr(name), 60)} is unknown; did you mean {similar}?")


def _is_known(name: str) -> bool:
    try:
        b" ".decode(name)
        return codecs.lookup(name).name.replace("_", "-") not in NOT_OF_FILES
    except UnicodeDecodeError:  # half a character
        return True
    except (LookupError, ValueError):
        return False


def read_text(source: Source) -> Iterator[Piece]:
    """A file of plain text: one document."""
    return document(decoded(source), source.reading.limits.piece)


def decoded(source: Source, declared: re.Pattern[bytes] | None = None) -> Iterator[str]:
    """The text of a source in chunks. `declared` finds the encoding that its head declares.

    Unusable if it is not text in its encoding: for a source that was found, always before the first
    chunk. It is decoded twice for that, if it is long, in the first of several readings.
    """
    chunks = _chunks(source, declared)
    if source.is_named or source.name in source.reading.decodable:
        yield from chunks
        return
    first = list(itertools.islice(chunks, 2))
    if len(first) < 2:
        yield from first
        return
    with source.reading.progress.paused():
        for _ in chunks:
            pass
    source.reading.decodable.add(source.name)
    yield from _chunks(source, declared)


def _chunks(source: Source, declared: re.Pattern[bytes] | None) -> Iterator[str]:
    with closing(source.open()) as stream:
        try:
            yield from _decode(source, stream, declared)
        except Unusable:
            # A damaged compressed file yields garbage until its checksum, at the end, fails.
            while source.is_unpacked and stream.read(source.reading.limits.piece):
                activity.tick()
            raise


def _decode(source: Source, stream: Stream, declared: re.Pattern[bytes] | None) -> Iterator[str]:
    head = stream.read(HEAD)
    encoding = _encoding(source, head, declared)
    if codecs.lookup(encoding).name == "utf-8" and (name := unmarked_utf16(head)):
        raise _wrong_encoding(source, head, "is not UTF-8: every second byte is zero", name)
    decoder = codecs.getincrementaldecoder(encoding)()
    offset, before = 0, b""
    for block in _blocks(head, stream, source.reading.limits.piece):
        try:
            text = decoder.decode(block, not block)
        except UnicodeError as error:
            around = before + block + stream.read(source.reading.limits.piece)
            raise _undecodable(source, encoding, error, block, offset, around) from None
        if "\0" in text and not source.is_named:
            raise Unusable(source.name, "is binary: it has zero bytes", "leave it out")
        if text:
            yield text
        offset += len(block)
        before = block


def _blocks(head: bytes, stream: Stream, size: int) -> Iterator[bytes]:
    """The head, the rest of the stream, and an empty block at the end."""
    for start in range(0, len(head), size):
        yield head[start : start + size]
    while block := stream.read(size):
        yield block
    yield b""


def _encoding(source: Source, head: bytes, declared: re.Pattern[bytes] | None) -> str:
    """A byte order mark decides, then the user, then what the text declares; else it is UTF-8."""
    if head.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    for mark, name in MARKS.items():
        if head.startswith(mark):
            source.reading.tally.note(f"text was read as {name} because of its byte order mark")
            return name
    if source.reading.encoding:
        return source.reading.encoding
    found = declared.search(head) if declared else None
    name = found[1].decode("ascii") if found else ""
    # A declaration of UTF-16 in a text in UTF-8 was true before the text was converted.
    return name if _is_known(name) and not name.lower().startswith("utf") else "utf-8"


def _undecodable(
    source: Source, encoding: str, error: UnicodeError, block: bytes, offset: int, around: bytes
) -> Unusable:
    """The error for a block that begins at `offset` and cannot be decoded.

    `around` is that block with those before and after it.
    """
    is_utf8 = codecs.lookup(encoding).name.startswith("utf-8")
    shown_name = "UTF-8" if is_utf8 else encoding
    reason = f"is not {shown_name}"
    if isinstance(error, UnicodeDecodeError):
        # The rest of the previous block precedes this one.
        data = error.object
        position = offset - (len(data) - len(block)) + error.start
        byte = f"byte {data[error.start]:#04x} " if data else ""
        reason += f": {byte}at offset {position:,}"
    if not is_utf8:
        if source.reading.encoding == encoding:
            return Unusable(source.name, reason, "give another --encoding, or none for UTF-8")
        return Unusable(source.name, reason, "it is damaged; save it as UTF-8")
    return _wrong_encoding(source, around, reason, likely_encoding(around))


def _wrong_encoding(source: Source, data: bytes, reason: str, likely: str | None) -> Unusable:
    """The error for a file that is not UTF-8 but, from its data, likely in another encoding."""
    words = advice(source.name, data)
    found = KIND.match(words)
    if not found:
        return Unusable(
            source.name, reason, words if _takes_commands(source) else "save it as UTF-8"
        )
    kind, mark, rest = found.groups()
    other = f"convert it: {rest}" if mark == ":" else rest
    if not _takes_commands(source):
        other = "convert it to text"
    if kind == f"probably {likely}":
        option = f"add --encoding {likely}"
        other = f"{option}, or {other}" if _takes_commands(source) else option
    return Unusable(source.name, f"{reason}, but {kind}", other)


def _takes_commands(source: Source) -> bool:
    """True if a command can read it: it is not part of an archive, and its name can be shown."""
    return not source.is_unpacked and source.name.isprintable() and "\ufffd" not in source.name
