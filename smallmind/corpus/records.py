"""Files of many records: their lines, and the field that holds the text."""

import io
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from smallmind.checks import InputError
from smallmind.corpus.chats import read_exported
from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry, Piece, document
from smallmind.corpus.reading import QUESTIONS, NoText, Unusable, shown
from smallmind.corpus.shapes import TEXT_NAMES, Row, Unfolded
from smallmind.corpus.turns import NEEDED, TurnFields, Turns, find_shape
from smallmind.text.exports import program_of

MAX_NAMES = 20  # fields in a message
BYTES_PER_BLOCK = 2**16  # that are divided into lines at once: they are in a near cache


def lines(entry: Entry, chunks: Iterable[str] | None = None) -> Iterator[str]:
    """Yields lines with their ends: LF, CRLF or CR. InputError for one that is too long.

    `chunks` are the text of the entry if it has been decoded.
    """
    longest = entry.reading.limits.record
    chunks = decoded(entry, block=BYTES_PER_BLOCK) if chunks is None else chunks
    line: list[str] = []  # the parts of it that have been read
    number, length, held = 1, 0, ""
    for chunk in chunks:
        chunk = held + chunk
        # A CR at the end may be half of a CRLF.
        held = "\r" if chunk.endswith("\r") else ""
        chunk = chunk.removesuffix("\r") if held else chunk
        for part in io.StringIO(chunk, newline="" if "\r" in chunk else "\n"):
            if not line and part[-1] == "\n" and len(part) <= longest:  # as most are
                number += 1
                yield part
                continue
            line.append(part)
            length += len(part)
            if length > longest:
                raise too_long(entry, f"line {number:,}")
            if part.endswith(("\n", "\r")):
                yield "".join(line)
                line, length, number = [], 0, number + 1
    if line or held:
        yield "".join(line) + held


def too_long(entry: Entry, where: str) -> InputError:
    """Returns the error for a line, cell or tag that would take too much memory."""
    longest = entry.reading.limits.record
    return InputError(
        f"{entry.name}: {where} has more than {longest:,} characters; divide it into several"
    )


class Records:
    """Reads records: conversations, or texts in the field of the user, else the obvious one."""

    def __init__(self, entry: Entry, name: str = "field") -> None:
        self._entry = entry
        self._name = name  # what a field is called in such files
        self._chosen: str | None = None
        self._turns: Turns | None = None
        self._unfolded = Unfolded(entry.reading)
        self._is_known = entry.reading.chat is False or bool(entry.reading.field)

    def documents(self, rows: Iterable[Row]) -> Iterator[Piece]:
        """Yields the conversation or the document of each record. Unusable if one has neither."""
        rows = iter(rows)
        first = list(itertools.islice(rows, 1))
        is_new = first and not (self._is_known or self._entry.reading.is_earlier)
        program = program_of(first[0][0]) if is_new else ""
        rows = itertools.chain(iter(first), rows)
        del first  # which may be large
        if program:
            yield from read_exported(self._entry, program, (value for value, _ in rows))
            return
        longest = self._entry.reading.limits.piece
        for value, where in self._unfolded.rows(rows):
            if value is not None and not self._is_known:
                self._look_for_turns(value if isinstance(value, dict) else (), where, value)
            if self._turns and value is not None:
                if piece := self._turns.read(value, where):
                    yield piece
            elif text := self._text_of(value, where):
                if len(text) <= longest:
                    yield Piece(text, True)
                else:
                    yield from document([text], longest)
            else:
                self._entry.reading.empty += 1
            value = ""  # it may be large, while the next one is read

    def columns(
        self, names: Sequence[str], first: object, where: str, are_texts: bool = False
    ) -> Sequence[str]:
        """Returns the columns of a table that are read, by its first row. Unusable without text.

        Where all of them `are_texts`, an only column is read whatever it is called.
        """
        first = self._unfolded.opened(first)
        if self._unfolded.has(first):
            return names
        if shape := self._look_for_turns(names, where, first):
            return shape.names
        if are_texts and len(names) == 1 and not self._entry.reading.field:
            self._choose_only(names[0])
        return [self._choose(names, where)]

    def _look_for_turns(
        self, names: Collection[object], where: str, record: object
    ) -> TurnFields | None:
        """Finds out which fields of a first record are turns. InputError if --chat finds none."""
        if self._is_known:
            return None
        self._is_known = True
        needs_answer = self._entry.reading.preferences != QUESTIONS
        first = record if isinstance(record, dict) else None
        shape = find_shape(names, first, TEXT_NAMES, needs_answer)
        if shape:
            self._turns = Turns(self._entry, shape, has_text=named(names, TEXT_NAMES) is not None)
        elif self._entry.reading.chat:
            raise InputError(
                f"{self._entry.name} has no conversation in {where}; --chat needs fields with "
                f"{NEEDED}; leave it out to read texts"
            )
        return shape

    def _choose(self, names: Collection[object], where: str) -> str:
        """Returns the field, the same for all records of a file. Unusable if one lacks it."""
        if self._chosen in names and self._chosen is not None:
            return self._chosen
        if self._chosen is None:
            field = self._entry.reading.field
            found = named(names, (field,) if field else TEXT_NAMES)
            if found is not None:
                self._choose_only(found)
        if self._chosen is None or self._chosen not in names:
            raise self._missing([name for name in names if isinstance(name, str)], where)
        return self._chosen

    def _choose_only(self, field: str) -> None:
        """Reads this field of all records, and says so unless the user has chosen it."""
        self._chosen = field
        if not self._entry.reading.field:
            words = f"read the text from {self._name} {shown(field, 60)!r}"
            self._entry.reading.note(words)

    def _text_of(self, value: object, where: str) -> str | None:
        """Returns the text of a record, or None for null. Unusable if there is no text in it."""
        if isinstance(value, dict):
            name = self._choose(value, where)
            if not self._entry.reading.field:
                self._entry.reading.note_unread(value, (name,))
            value = value[name]
            if value is not None and not isinstance(value, str):
                where = f"field {shown(name, 60)!r} in {where}"
        elif value is not None and not isinstance(value, str):
            reason = f"has {kind_of(value)} in {where}"
            advice = "a record must be an object with the text in one of its fields, or a text"
            raise NoText(self._entry.name, reason, advice)
        if value is None or isinstance(value, str):
            return value
        reason = f"has {kind_of(value)} as {where}"
        raise NoText(self._entry.name, reason, "give --field with one that holds text")

    def _missing(self, known: list[str], where: str) -> NoText:
        field = self._chosen or self._entry.reading.field
        wanted = repr(shown(field, 60)) if field else "'text', 'content' or 'story'"
        names = ", ".join(shown(name, 60) for name in known[:MAX_NAMES])
        names += " and others" if len(known) > MAX_NAMES else ""
        reason = f"has no field {wanted} in {where}"
        if not known:
            return NoText(self._entry.name, reason, "it has no fields at all")
        several = [name.strip() for name in (field or "").split(",")]
        if len(several) > 1 and all(named(known, (name,)) for name in several):
            advice = (
                f"--field takes one name: join {' and '.join(several)} into one field, such as "
                "text, in a copy of the file, and train on that; or give one of them"
            )
            return NoText(self._entry.name, reason, advice)
        return NoText(self._entry.name, reason, f"give --field with one of these: {names}")


def check_columns(entry: Entry, names: Sequence[str]) -> None:
    """Raises Unusable if two columns of a table have the same name."""
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        reason = f"has two columns with the name {shown(twice, 60)!r}"
        raise Unusable(entry.name, reason, "rename one of them")


def named(names: Collection[object], wanted: Iterable[str]) -> str | None:
    """-> the first of the wanted names that is among the names, if need be in other letter case."""
    known, wanted = [name for name in names if isinstance(name, str)], list(wanted)
    for key in (str, str.casefold):
        by_key = {key(name): name for name in reversed(known)}
        for word in wanted:
            if key(word) in by_key:
                return by_key[key(word)]
    return None


def kind_of(value: object) -> str:
    """Returns the JSON name of a value's type."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, list):
        return "an array"
    return "an object" if isinstance(value, dict) else f"a value of type {type(value).__name__}"
