"""Bytes to characters: the encoding of a file, and errors that name the one it probably has."""

import codecs
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from encodings.aliases import aliases

from smallmind.checks import InputError, nearest
from smallmind.console import activity
from smallmind.corpus.entry import HEAD_BYTES, Entry, Stream
from smallmind.corpus.reading import Unusable, shown
from smallmind.files.encoding import ALL_MARKS, MARKS, advice, likely_encoding, unmarked_utf16

KIND_OF_FILE = re.compile("it is (.+?)([:;]) (.+)")  # advice that knows what a file is
# Python has codecs of these names, which are not encodings of files.
OTHER_CODECS = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")


def check_encoding(name: str) -> None:
    """Raises InputError for the name of an unknown encoding, with the most similar known one."""
    if not _is_known(name):
        known = [
            word.replace("_", "-") for word in {*aliases, *aliases.values()} if _is_known(word)
        ]
        similar = nearest(name.lower(), sorted(known))
        raise InputError(f"encoding={shown(repr(name), 60)} is unknown; did you mean {similar}?")


def _is_known(name: str) -> bool:
    try:
        b" ".decode(name)
        return codecs.lookup(name).name.replace("_", "-") not in OTHER_CODECS
    except UnicodeDecodeError:  # an unpaired surrogate
        return True
    except (LookupError, ValueError):
        return False


def decoded(
    entry: Entry, declared: re.Pattern[bytes] | None = None, block: int | None = None
) -> Generator[str, None, None]:
    """Yields the text of an entry, by default in pieces; its head may declare the encoding.

    Unusable if it is not text.
    """
    block = min(block or entry.reading.limits.piece, entry.reading.limits.piece)
    with closing(entry.open()) as stream:
        try:
            yield from _decode(entry, stream, declared, block)
        except Unusable:
            # A damaged compressed file yields garbage until its checksum, at the end, fails.
            while entry.is_unpacked and stream.read(entry.reading.limits.piece):
                activity.tick()
            raise


def _decode(
    entry: Entry, stream: Stream, declared: re.Pattern[bytes] | None, size: int
) -> Iterator[str]:
    head = stream.read(HEAD_BYTES)
    encoding = _encoding(entry, head, declared)
    if codecs.lookup(encoding).name == "utf-8" and (name := unmarked_utf16(head)):
        every = "every second byte is zero" if b"\0" in head else "many bytes are controls"
        raise _wrong_encoding(entry, head, f"is not UTF-8: {every}", name)
    decoder = codecs.getincrementaldecoder(encoding)()
    offset, before = 0, b""
    for block in _blocks(head, stream, size):
        try:
            text = decoder.decode(block, not block)
        except UnicodeError as error:
            rest = head[offset + len(block) :] + stream.read(HEAD_BYTES)
            around = _around(error, before, block, rest)
            raise _undecodable(entry, encoding, error, block, offset, around) from None
        if "\0" in text and not entry.is_named:
            raise Unusable(entry.name, "is binary: it has zero bytes", "leave it out")
        if text:
            yield text
        offset += len(block)
        before = (before + block)[-HEAD_BYTES:]


def _around(error: UnicodeError, before: bytes, block: bytes, rest: bytes) -> bytes:
    """Returns the bytes on both sides of an error, the same whatever the length of a block."""
    place = len(before)
    if isinstance(error, UnicodeDecodeError):  # the rest of the previous block precedes this one
        place += len(block) - len(error.object) + error.start
    data = before + block + rest
    return data[max(0, place - HEAD_BYTES) : place + HEAD_BYTES]


def _blocks(head: bytes, stream: Stream, size: int) -> Iterator[bytes]:
    """Yields the head, the rest of the stream, and an empty block at the end."""
    for start in range(0, len(head), size):
        yield head[start : start + size]
    while block := stream.read(size):
        yield block
    yield b""


def _encoding(entry: Entry, head: bytes, declared: re.Pattern[bytes] | None) -> str:
    """-> the encoding by a byte order mark, the user, or what the text declares; else UTF-8."""
    if head.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if head.startswith(ALL_MARKS):
        name = next(name for mark, name in MARKS.items() if head.startswith(mark))
        entry.reading.note(f"text was read as {name} because of its byte order mark")
        return name
    if entry.reading.encoding and not entry.declares:
        return entry.reading.encoding
    found = declared.search(head) if declared else None
    name = found[1].decode("ascii") if found else ""
    # A declaration of UTF-16 in a text in UTF-8 was true before the text was converted.
    return name if _is_known(name) and not name.lower().startswith("utf") else "utf-8"


def _undecodable(
    entry: Entry, encoding: str, error: UnicodeError, block: bytes, offset: int, around: bytes
) -> Unusable:
    """Returns the error for a block at `offset`, which `around` has with the ones beside it."""
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
        if entry.reading.encoding == encoding:
            return Unusable(entry.name, reason, "give another --encoding, or none for UTF-8")
        return Unusable(entry.name, reason, "it is damaged; save it as UTF-8")
    return _wrong_encoding(entry, around, reason, likely_encoding(around))


def _wrong_encoding(entry: Entry, data: bytes, reason: str, likely: str | None) -> Unusable:
    """-> the error for a file that is not UTF-8 but, from its data, likely in another encoding."""
    words = advice(entry.name, data)
    found = KIND_OF_FILE.match(words)
    if not found:
        return Unusable(entry.name, reason, words if _takes_commands(entry) else "save it as UTF-8")
    kind, mark, rest = found.groups()
    other = f"convert it: {rest}" if mark == ":" else rest
    if not _takes_commands(entry):
        other = "convert it to text"
    if kind == f"probably {likely}":
        option = f"add --encoding {likely}"
        other = f"{option}, or {other}" if _takes_commands(entry) else option
    reason = f"{reason}, but {kind}" if kind.startswith("probably") else f"is {kind}"
    return Unusable(entry.name, reason, other)


def _takes_commands(entry: Entry) -> bool:
    """-> True if a command can read it: it is not part of an archive, and its name can be shown."""
    return not entry.is_unpacked and entry.name.isprintable() and "\ufffd" not in entry.name
