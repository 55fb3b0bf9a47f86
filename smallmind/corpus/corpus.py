"""A person's texts, read document by document in bounded memory."""

import io
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from os import PathLike

from smallmind.checks import InputError, check_type, count_of
from smallmind.console import activity
from smallmind.corpus.chats import unassigned
from smallmind.corpus.decoding import check_encoding
from smallmind.corpus.entry import (
    SMALL,
    Entry,
    Piece,
    may_have_turns,
    read,
    read_found,
    small_text,
)
from smallmind.corpus.finding import File, find
from smallmind.corpus.reading import (
    LABELS,
    Limits,
    Reading,
    Report,
    Skipped,
    shown,
    small_bytes,
)
from smallmind.corpus.turns import NEEDED
from smallmind.text.chat import REJECTED, Turn

EXPANSION = 4  # of compressed texts, about
MAX_REASONS = 3  # in a message
TEXT, THOUGHT = map(operator.attrgetter, ("text", "thought"))  # of a turn
SURROGATES = re.compile("[\ud800-\udfff]")  # JSON can write one half of a UTF-16 pair; UTF-8 cannot
KINDS = "better and worse answers", "conversations", "plain text"  # which files have
LINE_ENDS = {
    "\r\n": "CRLF line ends became LF",
    "\r": "CR line ends became LF",
}


class Corpus:
    """Texts from files, folders and globs, read document by document, always in the same order.

    A text file is a document, and so are each line of .jsonl, row of .csv, element of .json and
    member of .zip. `field` names the field of a record that holds its text; by default it is
    "text", "content" or "story". Records with messages, or with questions and answers, are
    conversations, whose turns are pieces: with chat=False they are texts too, and with chat=True
    other records are refused. With `preferences`, PAIRS or LABELS, worse answers are turns too,
    and with QUESTIONS no question needs an answer.
    `assistant` is who answers in chats of people. `encoding` is that of files without a byte order
    mark; by default they are UTF-8. Files and folders that a pattern in `exclude` matches are left
    out, and those of folders that none in `include` matches. Unless gitignore is False, so are
    those that git ignores and, without `include`, minified and generated files. InputError if a
    path means nothing, or a setting is wrong.
    """

    files: Sequence[File]  # with texts, as far as their names tell
    report: Report | None  # on the last complete reading
    is_earlier = False  # True: they are read as versions before 0.3 did, for their runs

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        field: str | None = None,
        encoding: str | None = None,
        limits: Limits | None = None,
        chat: bool | None = None,
        exclude: str | Sequence[str] | None = None,
        include: str | Sequence[str] | None = None,
        gitignore: bool = True,
        assistant: str | None = None,
        preferences: str = "",
    ) -> None:
        self.preferences = preferences
        paths = [paths] if isinstance(paths, str | PathLike) else paths
        for path in check_type("paths", paths, Sequence):
            check_type("a path", path, str, PathLike)
        self._paths = [shown(path) for path in paths]
        self.field = check_type("field", field, str, None)
        self.encoding = check_type("encoding", encoding, str, None)
        if encoding is not None:
            check_encoding(encoding)
        self.chat = check_type("chat", chat, bool, None)
        if chat and field:
            raise InputError(
                f"--chat reads conversations, and --field {field} single texts: leave out one of "
                "the two"
            )
        self.assistant = check_type("assistant", assistant, str, None)
        if assistant is not None and (chat is False or field):
            other = f"--field {field}" if field else "--no-chat"
            raise InputError(
                f"--assistant reads chats, and {other} texts: leave out one of the two"
            )
        self._limits = limits or Limits()
        self._decodable: set[str] = set()
        exclude = [exclude] if isinstance(exclude, str) else exclude or ()
        include = [include] if isinstance(include, str) else include or ()
        for name, patterns in (("exclude", exclude), ("include", include)):
            for pattern in check_type(name, patterns, Sequence):
                check_type("a pattern", pattern, str)
        generated = not check_type("gitignore", gitignore, bool) or bool(include)
        self.files, self._skipped, self._notes = find(paths, exclude, include, gitignore)
        # Nobody has left out a file that was named.
        self.reads_generated = generated or all(file.is_named for file in self.files)
        self.report = None
        if not self.files:
            raise _nothing(self._skipped, self._notes)

    def pieces(self, doing: str = "Reading") -> Iterator[Piece]:
        """Yields all documents in pieces; each call reads the files again, and completes a report.

        `doing` is what is shown meanwhile, before the name of the file or their number.

        InputError for a file that was named and cannot be used, for a damaged one, and if there is
        no text in any.
        """
        size = sum(file.size for file in self.files)
        one = len(self.files) == 1
        what = shown(self.files[0].name) if one else count_of(len(self.files), "file")
        with activity.doing(f"{doing} {what}", usual=size < activity.LARGE):
            reading = self._reading(size)
            cleaner = _Cleaner(reading)
            holds = dict[int, str]()  # the first of KINDS that a file has -> the first such file
            for file in self.files:
                pieces, kinds = _pieces(file, reading, cleaner), set[int]()
                yield from _noted(pieces, kinds, self.preferences) if self.preferences else pieces
                if kinds:
                    holds.setdefault(min(kinds), shown(file.name))
            if 0 in holds and len(holds) > 1:
                raise _mixed(holds)
            if reading.speakers and not reading.documents:
                raise unassigned(what, reading, self._paths)
            if self.assistant and not reading.program:
                raise InputError(
                    f"--assistant {shown(self.assistant, 60)} is for exported chats, and "
                    f"{what} has none; leave it out"
                )
            if not reading.documents:
                notes = reading.report([], self._notes).notes
                raise _nothing([*self._skipped, *reading.skipped], notes)
            if self.chat and not reading.conversations:
                raise InputError(
                    f"no conversations were found; --chat needs records with {NEEDED}; leave it "
                    "out to read texts"
                )
            self.report = reading.report(self._skipped, self._notes)

    def _reading(self, size: int) -> Reading:
        how = self.field, self.encoding, self._limits, size, self._decodable
        reading = Reading(*how, self.chat, self.reads_generated, self.assistant, self.preferences)
        reading.is_earlier = self.is_earlier
        return reading

    @property
    def about_characters(self) -> int:
        """About how many characters the files have, which are not read: as if each were a byte."""
        return sum(file.size * (EXPANSION if file.is_compressed else 1) for file in self.files)

    def has_conversations(self) -> bool:
        """-> True if any file has conversations: the first record of each tells, as in `pieces`."""
        if self.chat is False or self.field:
            return False
        reading = self._reading(0)
        reading.is_glance = True
        with activity.doing("Looking for conversations", usual=True):
            cleaner, files = _Cleaner(reading), activity.parts(self.files)
            likely = (file for file in files if file.is_named or may_have_turns(file.name))
            return any(bool(x.turns) for file in likely for x in _pieces(file, reading, cleaner))


def _pieces(file: File, reading: Reading, cleaner: "_Cleaner") -> Iterator[Piece]:
    """Yields the documents of a file, cleaned and counted."""
    before, text = reading.documents, None
    pieces: Iterable[Piece]
    if not file.is_named and file.size < SMALL:
        load = partial(small_bytes, file.name, file.size, reading)
        text = small_text(file.name, reading, load)
    if text:
        pieces = [Piece(text, True)]
    else:
        entry = Entry.of_file(file.name, reading, file.is_named, file.size)
        pieces = read(entry) if file.is_named else read_found(entry)
    for piece in pieces:
        if cleaned := cleaner.clean(piece):
            yield cleaned
    reading.end_file(file.size, has_text=reading.documents > before)


class _Cleaner:
    """Cleans pieces of documents, and counts them: LF ends lines, lone surrogates are replaced."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        # It holds back a CR at the end of a piece: an LF may follow.
        self._newlines = io.IncrementalNewlineDecoder(None, translate=True)

    def clean(self, piece: Piece) -> Piece | None:
        """Returns the piece with its text cleaned; None if nothing is left of it."""
        if piece.turns:
            text = "".join(map(TEXT, piece.turns))
            # All together, which takes half the time.
            is_plain = "\r" not in text and (text.isascii() or self._whole(text) is text)
            if not is_plain or any(map(THOUGHT, piece.turns)):
                piece = piece._replace(turns=[self._turn(turn) for turn in piece.turns])
                text = "".join(map(TEXT, piece.turns))
        else:
            text = self._whole(self._newlines.decode(piece.text, piece.ends))
            piece = piece if text == piece.text else piece._replace(text=text)
        self._reading.count_text(len(text), piece.ends)
        if piece.ends and (ends := self._newlines.newlines):
            for end in (ends,) if isinstance(ends, str) else ends:
                if end in LINE_ENDS:
                    self._reading.note(LINE_ENDS[end])
            self._newlines.reset()
        return piece if text or piece.turns else None

    def _turn(self, turn: Turn) -> Turn:
        text, thought, more = (
            self._whole(self._newlines.decode(each, final=True))
            for each in (turn.text, turn.thought, turn.more)
        )
        return turn._replace(text=text, thought=thought, more=more)

    def _whole(self, text: str) -> str:
        try:
            if not text.isascii():
                text.encode()  # ten times as fast as looking for them
        except UnicodeEncodeError:
            self._reading.note("unpaired surrogates became U+FFFD")
            return SURROGATES.sub("\ufffd", text)
        return text


def _noted(pieces: Iterable[Piece], kinds: set[int], preferences: str) -> Iterator[Piece]:
    """Yields the pieces, and adds the numbers of their KINDS."""
    for piece in pieces:
        last = piece.turns[-1].role if piece.turns else ""
        kinds.add(2 if not last else 0 if last == REJECTED or preferences == LABELS else 1)
        yield piece


def _mixed(holds: dict[int, str]) -> InputError:
    other = max(holds)
    return InputError(
        f"{holds[0]} has {KINDS[0]}, and {holds[other]} has {KINDS[other]}: a run learns from one "
        f"of both. Train on {holds[other]} first, and on {holds[0]} with --init-from that run; or "
        "give --loss cross-entropy, which learns the better answers and all the rest"
    )


def _nothing(skipped: list[Skipped], notes: Sequence[str]) -> InputError:
    """Returns the error if there is no text at all."""
    if not skipped and notes:
        return InputError(f"no text was found ({notes[0]}); give other texts or patterns")
    reasons = "; ".join(map(str, skipped[:MAX_REASONS]))
    more = len(skipped) - MAX_REASONS
    reasons += f"; and {more:,} more" if more > 0 else ""
    found = f": {reasons}" if reasons else ""
    return InputError(f"no text was found{found}; give a file or folder with text in it")
