"""One reading of the texts: how it is done, and what it has found so far."""

import io
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from smallmind.checks import InputError, count_of
from smallmind.console import activity
from smallmind.corpus.json_values import has_text
from smallmind.files import durable
from smallmind.text.chat import Turn

BYTES_PER_STEP = 2**16  # bytes between two changes of the share that has been read
# Records are read for pairs of better and worse answers, for labels of single ones, or for
# questions that need no answer; else for answers to learn.
PAIRS, LABELS, QUESTIONS = "pairs", "labels", "questions"
MAX_UNREAD, MAX_SHOWN = 256, 12  # names of fields that are remembered, and that are shown


@dataclass(frozen=True)
class Limits:
    """Limits on the memory in use at once, and on the expansion of compressed files."""

    # Characters of a piece, to which one that was held back may be added; bytes read at once.
    piece: int = 2**20
    record: int = 256 * 10**6  # characters of a line of JSON, a cell of a table or a comment
    tag: int = 2**22  # characters of a tag of HTML, whose parser needs a hundred times the memory
    whole: int = 512 * 10**6  # bytes of a .json file, which is read whole
    # Prose shrinks to a third or a quarter, a log of similar lines to a fiftieth, and files that
    # are made to fill a disk to a thousandth or less. Little is harmless whatever its ratio, as it
    # is unpacked piece by piece.
    ratio: int = 200
    unpacked: int = 2**26  # bytes that may come from any compressed file


class Skipped(NamedTuple):
    """A file that was found, not named, and is not used. The reason is what follows its name."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


class Unusable(InputError):
    """No text can be had from a file. One that was merely found is skipped for it."""

    def __init__(self, name: str, reason: str, advice: str, where: str = "") -> None:
        super().__init__(f"{name}{where and ': '}{where} {reason}; {advice}")
        self.reason = f"{where and 'is damaged: '}{where}{where and ' '}{reason}"


class NoText(Unusable):
    """A record has no text where one is looked for."""


@dataclass(frozen=True)
class Report:
    """The findings of a complete reading."""

    files: int  # that have text in them
    documents: int
    characters: int
    empty: int  # records without text, which are not among the documents
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]  # what was done to the texts: "CRLF line ends became LF in 3 files"
    conversations: int = 0  # of the documents
    turns: int = 0  # of all conversations
    unanswered: int = 0  # conversations without an answer, which are not among the documents
    # Suffixes of files, also in archives: how many of them, their documents and characters.
    kinds: tuple[tuple[str, int, int, int], ...] = ()

    def leaving_out(self, thoughts: int) -> "Report":
        """Adds the note that a chat template cannot write these thoughts, if there are any."""
        note = f"Left out: {count_of(thoughts, 'thought')}, which the chat template cannot render"
        return self.noting(note) if thoughts else self

    def noting(self, note: str) -> "Report":
        """Adds a note, once."""
        return self if note in self.notes else replace(self, notes=(*self.notes, note))


class Reading:
    """A reading of texts: how they are read, what was found so far, which share has been read."""

    def __init__(
        self,
        field: str | None,
        encoding: str | None,
        limits: Limits,
        size: int,
        decodable: set[str],
        chat: bool | None = None,
        generated: bool = True,
        assistant: str | None = None,
        preferences: str = "",
    ) -> None:
        self.preferences = preferences  # PAIRS, LABELS, QUESTIONS or nothing
        self.generated = generated  # whether minified and generated files are read
        self.kind, self.is_new = "", True  # of the file that is read; True until it has a text
        self._kinds: dict[str, list[int]] = {}
        self.chat = chat  # conversations in records; None: where they are recognised
        self.assistant = assistant  # who answers in chats of people
        self.speakers: Counter[str] = Counter()  # their turns in such chats
        self.program = ""  # that exported the last of these
        self.people: dict[str, dict[str, str]] = {}  # file of Slack's users -> names by ids
        self.is_earlier = False  # as versions before 0.3 read, for their runs
        self.is_glance = False  # only at the first record of each file that has records
        self.field = field  # of a record, its text; None: the obvious one
        self.encoding = encoding  # of what has no byte order mark; None: UTF-8
        self.limits = limits
        # Names of what was decoded to its end, in this or in an earlier reading.
        self.decodable = decodable
        self.files = self.documents = self.characters = self.empty = 0
        self.conversations = self.turns = self.unanswered = 0
        self.skipped: list[Skipped] = []
        # Names of fields with text that nothing reads, of records, or where that is True of turns.
        self.unread: dict[tuple[str, bool], None] = {}
        self._counts: dict[tuple[str, str, str], int] = {}
        self._notes: Counter[str] = Counter()
        self._of_this_file: set[str] = set()
        self.is_unfolded = False  # its records are read as others, with fields of their own
        self._start = 0  # where the current file begins in all bytes
        self._steps = activity.parts(range(math.ceil(size / BYTES_PER_STEP)))
        self._done, self.is_paused = -1, False

    def note(self, words: str) -> None:
        """Notes something about the file that is being read, once per file."""
        self._of_this_file.add(words)

    def count(self, label: str, thing: str, more: str, n: int = 1) -> None:
        """Counts things for the summary: "Left out: 3 conversations with a blank question"."""
        key = label, thing, more
        self._counts[key] = self._counts.get(key, 0) + n

    def leave_unread(self, name: object, in_turns: bool = False) -> None:
        """Remembers a field with text that is not part of what is read."""
        if isinstance(name, str) and len(self.unread) < MAX_UNREAD:
            self.unread[name, in_turns] = None

    def note_unread(
        self, record: dict[Any, Any], read: Collection[str], turns: Iterable[Turn] = ()
    ) -> None:
        """Remembers the fields of a record with text that is neither read nor that of a turn."""
        said: set[str] | None = None
        for name, value in record.items():
            if name in read or (name, False) in self.unread or not has_text(value):
                continue
            if isinstance(value, str):
                if said is None:
                    said = {text.strip() for turn in turns for text in (turn.text, turn.thought)}
                if value.strip() in said:
                    continue
            self.leave_unread(name)

    def count_text(self, characters: int, ends: bool) -> None:
        """Counts a part of a document in the file that is read."""
        counts = self._kinds.get(self.kind) or self._kinds.setdefault(self.kind, [0, 0, 0])
        counts[0] += self.is_new
        counts[1] += ends
        counts[2] += characters
        self.is_new = False
        self.documents += ends
        self.characters += characters

    @property
    def is_usual(self) -> bool:
        """True if a text in UTF-8 is read as it is."""
        return not (self.encoding or self.assistant or self.is_earlier or self.is_glance)

    @property
    def left_out(self) -> int:
        """Conversations from which nothing is learned."""
        counted = (n for (label, *_), n in self._counts.items() if label == "Left out")
        return self.unanswered + sum(counted)

    def end_file(self, size: int, has_text: bool) -> None:
        """Ends the file; what was noted about one without text is dropped."""
        self._start += size
        self.files += has_text
        if self._of_this_file:
            self._notes.update(self._of_this_file if has_text else ())
            self._of_this_file.clear()
        self.is_unfolded = False

    def report(self, skipped: list[Skipped], before: list[str]) -> Report:
        """Returns all that was found, after what was `skipped` and noted `before` the reading."""
        notes = [f"{words} in {count_of(n, 'file')}" for words, n in sorted(self._notes.items())]
        for (label, thing, more), n in sorted(self._counts.items()):
            if n:
                notes.append(f"{label}: {count_of(n, thing)} {more}")
        unread = [repr(shown(name, 60)) + " of turns" * of_turns for name, of_turns in self.unread]
        if more_names := unread[MAX_SHOWN:]:
            unread = [*unread[:MAX_SHOWN], f"{len(more_names):,} more"]
        if unread:
            notes.append(f"Not read: the text in {', '.join(unread)}")
        notes += before
        counts = self.files, self.documents, self.characters, self.empty
        turns = self.conversations, self.turns, self.unanswered
        kinds = sorted(self._kinds.items(), key=lambda item: (-item[1][2], item[0]))
        by_kind = tuple((kind, files, texts, size) for kind, (files, texts, size) in kinds)
        return Report(*counts, (*skipped, *self.skipped), tuple(notes), *turns, kinds=by_kind)

    def reach(self, position: int) -> None:
        """Shows that the current file has been read up to this position."""
        activity.tick()
        while not self.is_paused and self._done < (self._start + position) // BYTES_PER_STEP:
            self._done += 1
            next(self._steps, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Shows no progress within the block: its bytes will be read again."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def found(self) -> tuple[Any, ...]:
        """Returns a copy of all that readers have counted, for `restore`."""
        counts = self.empty, self.unanswered, self.conversations, self.turns
        names = self._counts.copy(), self.unread.copy(), self._of_this_file.copy()
        return counts, names, len(self.skipped)

    def restore(self, found: tuple[Any, ...]) -> None:
        """Forgets what readers have counted since."""
        counts, names, skipped = found
        self.empty, self.unanswered, self.conversations, self.turns = counts
        self._counts, self.unread, self._of_this_file = (each.copy() for each in names)
        del self.skipped[skipped:]


class FileStream(io.BufferedReader):
    """The bytes of a regular file, read as progress. InputError if it cannot be read."""

    def __init__(self, path: str, reading: Reading) -> None:
        self._name, self._reading, self.count = shown(path), reading, 0
        try:
            super().__init__(io.FileIO(durable.open_descriptor(path)))
        except OSError as error:
            raise InputError(f"cannot read {self._name}: {error.strerror}") from None
        except ValueError:
            raise InputError(not_regular(path)) from None

    def size(self) -> int:
        """Returns bytes."""
        return os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            data = super().read(size)
        except OSError as error:
            raise InputError(f"cannot read {self._name}: {error.strerror}") from None
        self.count += len(data)
        self._reading.reach(self.tell())
        return data


def small_bytes(path: str, size: int, reading: Reading) -> bytes | None:
    """Reads a regular file of this small size at once; None if it is not that, or refused."""
    try:
        file = durable.open_descriptor(path)
    except (OSError, ValueError):
        return None
    try:
        data = os.read(file, size + 1)
    except OSError:
        return None
    finally:
        os.close(file)
    reading.reach(size)
    return data if len(data) == size else None


def shown(words: object, longest: int = 4096) -> str:
    """Returns a path or a message of another library, in one line that any terminal can show."""
    text = str(words)
    text = text if len(text) <= longest else f"{text[: longest - 3]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def not_regular(path: str) -> str:
    """Says what to do about a FIFO, a socket or a device."""
    return (
        f"{shown(path)} is not a regular file, and texts are read more than once; "
        "write it to a file first"
    )
