"""The input and output of a reader, and the choice of the reader for a file."""

import dataclasses
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from smallmind import parts
from smallmind.checks import InputError
from smallmind.corpus.reading import LABELS, FileStream, NoText, Reading, Skipped, Unusable, shown
from smallmind.files.encoding import (
    HTML,
    MARKED,
    MHTML,
    NOTEBOOK,
    TEXT_OF,
    WHATSAPP,
    Disguise,
    disguised,
    unmarked_utf16,
)
from smallmind.text.chat import Turn

TEXT_SUFFIX = ".txt"
HEAD_BYTES = 4096  # bytes that tell what a file is
SMALL = 2**16  # bytes: less are read at once
# They are not read inside a compressed file.
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet")
ARCHIVE_SUFFIXES = (".zip", ".parquet")
MARKUP_SUFFIXES = (".html", ".htm", ".xhtml", ".xht", ".xml")
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# Versions before 0.3 read these like any text.
LATER_SUFFIXES = (
    *(".md", ".markdown", ".srt", ".vtt", ".epub", ".docx", ".odt", ".pdf", ".mhtml", ".mht"),
    ".zst",
)
CHAT_NAME = re.compile("chat|whatsapp", re.IGNORECASE)  # in all languages of WhatsApp's exports
# Archives that have no reader: some of them would pass as text.
UNKNOWN_ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar")
# Files that programs write: by name, by a comment at the beginning (as in go.dev/s/generatedcode,
# or as GitHub's linguist looks for), and as code whose lines nobody writes so long.
GENERATED_NAME = re.compile(
    r".*[.-]min\.(js|css|mjs|cjs|html)|.*\.(js|mjs|cjs|css|ts)\.map|.*\.lock|go\.sum|"
    r"(package-lock|npm-shrinkwrap|packages\.lock)\.json|pnpm-lock\.yaml|.*_pb2(_grpc)?\.pyi?|"
    r".*\.pb\.(go|cc|h)",
    re.IGNORECASE,
)
GENERATED_MARK = re.compile(
    r"\s*(?:[#*;%'\"]|//|/\*|<!--|--).*(?:\bgenerated\b.*\bdo not (?:edit|modify)\b|@generated\b)",
    re.IGNORECASE,
)
SOURCE_MAP = re.compile(r'\s*\{\s*"version"\s*:\s*3\s*,(?s:.*)"mappings"\s*:')
MARKED_LINES = 20  # at the beginning
CODE_SUFFIXES = {f".{x}" for x in ["js", "mjs", "cjs", "jsx", "ts", "tsx", "css", "php", "py"]}
MINIFIED_LINE = 500  # characters of a line, on average: longer than anybody writes them


class Piece(NamedTuple):
    """Some of the text of a document, or a whole conversation, which has turns and no text."""

    text: str
    ends: bool  # whether the document ends here
    turns: Sequence[Turn] = ()
    where: str = ""  # the file and the record of a conversation, in words


class Stream(Protocol):
    """Bytes that are read from the first to the last."""

    count: int  # how many have been read

    def read(self, size: int, /) -> bytes:
        """Reads at most `size` bytes, fewer only at the end. InputError if it cannot."""
        ...

    def close(self) -> None: ...


@dataclass
class Entry:
    """A file, its unpacked content or a member of an archive: the input of a reader."""

    name: str  # in messages
    file: str  # name of a file, whose suffix says how to read it
    open: Callable[[], Stream]  # may be called again, to read from the beginning
    reading: Reading
    is_named: bool  # by the user, rather than found in a folder
    size: int | None  # bytes; None where only a header would say it
    declares: bool = False  # its encoding, whatever the user says about that of texts
    # Returns the file of a name beside the folder of this one; None if there is none.
    beside: "Callable[[str], Entry | None]" = lambda _: None

    @classmethod
    def of_file(cls, path: str, reading: Reading, is_named: bool, size: int) -> "Entry":
        """Returns a file of this many bytes."""

        def beside(name: str) -> Entry | None:
            folder = os.path.dirname(os.path.abspath(path))
            other = os.path.join(os.path.dirname(folder), name)
            return cls.of_file(other, reading, False, size) if os.path.isfile(other) else None

        def open() -> Stream:
            return FileStream(path, reading)

        name = shown(path)
        return cls(name, os.path.basename(path), open, reading, is_named, size, beside=beside)

    def __post_init__(self) -> None:
        self.suffix = os.path.splitext(self.file)[1].lower()

    @property
    def is_unpacked(self) -> bool:
        """True if the source comes out of a compressed file or an archive."""
        return self.size is None

    def unpacked(self, open: Callable[[], Stream]) -> "Entry":
        """Returns the uncompressed entry; its name lacks the suffix."""
        file = os.path.splitext(self.file)[0]
        return dataclasses.replace(self, file=file, open=open, size=None)


# It returns pieces, or the text of one document in chunks of any length.
Reader = Callable[[Entry], Iterator[Piece] | Iterator[str]]


def read(entry: Entry) -> Iterator[Piece]:
    """Yields the documents in an entry. Unusable if it has none, InputError if it is damaged."""
    if entry.size == 0:
        raise Unusable(entry.name, "is empty", "give a file with text in it")
    suffix = entry.suffix
    if suffix in UNKNOWN_ARCHIVES:
        raise Unusable(entry.name, f"is a {suffix} archive", "unpack it and give the files in it")
    if entry.is_unpacked and suffix in PACKED_SUFFIXES:
        reason = f"is a {suffix} file inside a compressed file"
        raise Unusable(entry.name, reason, "unpack the outer one first")
    has_records = suffix in (*RECORD_SUFFIXES, *PACKED_SUFFIXES)
    if entry.reading.is_glance and not has_records and not _may_be_chat(entry):
        return
    kind = _reader_of(entry)
    if entry.reading.is_glance and not has_records and kind != WHATSAPP:
        return
    reader: Reader = parts.load(parts.READERS, kind)
    longest = entry.reading.limits.piece
    entry.reading.kind, entry.reading.is_new = suffix, True
    left_out, skipped = entry.reading.left_out, len(entry.reading.skipped)
    found = reader(entry)
    first = next(found, None)
    if isinstance(first, str):
        found = document(itertools.chain([first], cast(Iterator[str], found)), longest)
        first = next(found, None)
    pieces = cast(Iterator[Piece], found)
    has_text = first is not None
    if first is not None:
        if entry.reading.assistant and not (first.turns or entry.is_named):
            raise Unusable(entry.name, "is not a chat, as --assistant expects", "name the file")
        yield first
        if entry.reading.is_glance and suffix in RECORD_SUFFIXES:
            return
        yield from pieces
    if not has_text and entry.reading.left_out > left_out and entry.reading.preferences == LABELS:
        advice = 'give each answer one, as in "label": true, or train without --loss kto'
        raise Unusable(entry.name, "has no answer with a label", advice)
    if not has_text and entry.reading.left_out > left_out:
        raise Unusable(
            entry.name,
            "has no conversation with an answer to learn",
            "in one of them the assistant must answer a question, without a mark such as weight 0",
        )
    # The speakers of chats are listed for all files together.
    if not has_text and not entry.reading.is_glance and not entry.reading.speakers:
        reasons = "".join(f": {each}" for each in entry.reading.skipped[skipped:][:1])
        raise Unusable(entry.name, f"has no text in it{reasons}", "give a file with text in it")


def _reader_of(entry: Entry) -> str:
    """Returns the suffix by which to read an entry, by its first bytes too, or raises Unusable.

    A small one is kept: to open it again would take most of its time.
    """
    with closing(entry.open()) as stream:
        data = stream.read(SMALL)
    if len(data) < SMALL and entry.suffix not in PACKED_SUFFIXES:
        entry.open = lambda: _Small(data, stream)
    return _named_reader(entry, entry.suffix, disguised(data[:HEAD_BYTES]))


class _Small(io.BytesIO):
    """The bytes of a small file."""

    count = 0

    def __init__(self, data: bytes, stream: Stream) -> None:
        super().__init__(data)
        self.expansion = getattr(stream, "expansion", None)  # of what it was unpacked from

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


def _named_reader(entry: Entry, suffix: str, found: Disguise | None) -> str:
    if entry.reading.is_earlier:
        suffix = TEXT_SUFFIX if suffix in LATER_SUFFIXES else suffix
        found = None if found and found.kind == MHTML else found
    is_table = suffix in (*PACKED_SUFFIXES, *RECORD_SUFFIXES)
    if found and found.kind == WHATSAPP:
        if _may_be_chat(entry):
            return WHATSAPP
        found = None
    if found is None or (found.kind == HTML and suffix in MARKUP_SUFFIXES):
        return suffix if suffix in parts.READERS else TEXT_SUFFIX
    if found.kind in TEXT_OF and (not is_table or (found.kind, suffix) == (NOTEBOOK, ".json")):
        if found.kind == HTML:
            entry.reading.note("read the text of HTML, without its tags,")
        return TEXT_OF[found.kind]
    raise Unusable(entry.name, f"is {found.kind}", found.advice(entry.name))


def may_have_turns(path: str) -> bool:
    """Returns False for a file that nobody named and that has no conversations, by its name."""
    file = os.path.basename(path)
    suffix = os.path.splitext(file)[1].lower()
    is_chat = suffix == TEXT_SUFFIX and CHAT_NAME.search(file) is not None
    return is_chat or suffix in (*RECORD_SUFFIXES, *PACKED_SUFFIXES)


def _may_be_chat(entry: Entry) -> bool:
    """Returns True for a text that is named, or has such a name, and is not wanted as a text."""
    is_called = CHAT_NAME.search(entry.file) or (entry.is_named and not entry.is_unpacked)
    reading = entry.reading
    is_text = reading.chat is False or reading.field or reading.is_earlier
    return bool(entry.suffix == TEXT_SUFFIX and is_called and not is_text)


def read_found(entry: Entry) -> Iterator[Piece]:
    """Yields the documents in an entry that nobody named: it is skipped if it is unusable.

    It is used as a whole or not at all, so a long one is read to its end first, in the first of
    several readings. InputError if only some of its records have text, and for an archive that
    turns out to be damaged later.
    """
    reading, short = entry.reading, None
    if not reading.generated and GENERATED_NAME.fullmatch(entry.file):
        _leave_out(entry)
        return
    before: tuple[Any, ...] | None = reading.found()
    try:
        if reading.is_glance and not any(piece.turns for piece in read(entry)):
            return
        # The members of an archive are skipped one by one.
        if entry.suffix not in ARCHIVE_SUFFIXES and entry.name not in reading.decodable:
            short = _checked(entry)
            if short is None:
                reading.decodable.add(entry.name)
                reading.restore(reading.found() if before is None else before)
        for piece in read(entry) if short is None else short:
            if (
                before is not None
                and not reading.generated
                and _is_generated(entry.suffix, piece.text)
            ):
                reading.restore(before)
                _leave_out(entry)
                return
            before = None
            yield piece
    except Unusable as error:
        if before is None:
            raise
        reading.restore(before)
        reading.skipped.append(Skipped(entry.name, error.reason))


def small_text(path: str, reading: Reading, load: Callable[[], bytes | None]) -> str | None:
    """-> the text of a small file that nobody named, if it is in UTF-8 and nothing else; or None.

    As most are: it is what `read_found` yields, in a fifth of the time.
    """
    suffix = os.path.splitext(path)[1].lower()
    has_reader = suffix in parts.READERS or suffix in UNKNOWN_ARCHIVES
    if (has_reader and suffix != TEXT_SUFFIX) or not reading.is_usual:
        return None
    if not (data := load()) or b"\0" in data or data.startswith(MARKED):
        return None
    head = data[:HEAD_BYTES]
    if disguised(head) or unmarked_utf16(head):
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    is_left_out = not reading.generated and (
        GENERATED_NAME.fullmatch(os.path.basename(path)) or _is_generated(suffix, text)
    )
    if is_left_out or len(text) > reading.limits.piece:
        return None
    reading.kind, reading.is_new = suffix, True
    return text


def _is_generated(suffix: str, text: str) -> bool:
    """-> True if this is the beginning of a file that a program has written, or minified."""
    if suffix in (*ARCHIVE_SUFFIXES, *RECORD_SUFFIXES):  # a member is looked at by itself
        return False
    lines = text.split("\n", MARKED_LINES)
    head = text[: len(text) - len(lines[-1])] if len(lines) > MARKED_LINES else text
    may_be_marked = "enerated" in head or "ENERATED" in head  # much faster than the expression
    if may_be_marked and any(
        GENERATED_MARK.match(line[:MINIFIED_LINE]) for line in lines[:MARKED_LINES]
    ):
        return True
    return bool(SOURCE_MAP.match(text[:HEAD_BYTES])) or (
        suffix in CODE_SUFFIXES and len(text) > MINIFIED_LINE * (4 + text.count("\n"))
    )


def _leave_out(entry: Entry) -> None:
    words = "generated or minified; --no-gitignore reads them"
    entry.reading.count("Not read", "file", words)


def _checked(entry: Entry) -> list[Piece] | None:
    """Reads an entry to its end -> its pieces, or None if together they are longer than a piece."""
    pieces: list[Piece] = []
    length, most = 0, entry.reading.limits.piece
    reading = entry.reading
    before = reading.is_glance, reading.is_paused
    reading.is_glance, reading.is_paused = False, True  # whatever is read of it later
    try:
        for piece in read(entry):
            length += len(piece.text)
            if piece.turns:
                length += sum(len(x.text) + len(x.thought) + len(x.more) for x in piece.turns)
            if length <= most:
                pieces.append(piece)
    except NoText as error:  # if others of the file have one, somebody means to read it
        raise InputError(str(error)) if length else error from None
    finally:
        reading.is_glance, reading.is_paused = before
    return pieces if length <= most else None


def document(chunks: Iterable[str], size: int) -> Iterator[Piece]:
    """Yields the chunks of one document, which may be empty, in pieces of at most `size`."""
    last = ""
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            if last:
                yield Piece(last, ends=False)
            last = chunk[start : start + size]
    if last:
        yield Piece(last, ends=True)
