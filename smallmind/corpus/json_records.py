"""JSON: a value per line, or a whole file that is an array of records or one record."""

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.json_values import DECODER, DuplicateKey, parsed, refusing_depth
from smallmind.corpus.reading import Unusable, shown
from smallmind.corpus.records import Records, lines, too_long
from smallmind.corpus.shapes import ONLY_VALUE, Row

SPACES = re.compile(r"[ \t\n\r]*")
OPENERS = tuple('{["')  # that lines of JSON begin with


def read_json_lines(entry: Entry) -> Iterator[Piece]:
    """Returns a document for each line with a JSON value; blank lines are left out."""
    return Records(entry).documents(json_lines(entry))


def read_json(entry: Entry) -> Iterator[Piece]:
    """Returns a document for each element of an array, or a single one. It is read whole."""
    return Records(entry).documents(json_elements(entry))


def json_lines(entry: Entry) -> Iterator[Row]:
    """Yields the value of each line that is not blank. Unusable, naming one that is not JSON."""
    for number, line in enumerate(lines(entry, decoded(entry)), 1):
        if line.isspace():
            continue
        where = f"line {number:,}"
        try:
            value = parsed(line)
        except ValueError as error:
            advice = "correct or remove that line"
            raise Unusable(entry.name, _problem(error), advice, where) from None
        yield value, where


def json_elements(entry: Entry) -> Iterator[Row]:
    """Yields the elements of an array, or the only value, or else the value of each line.

    Unusable if it is not JSON, InputError if it is too large.
    """
    if _has_lines(entry):
        entry.reading.note("read JSON with one value per line")
        yield from json_lines(entry)
        return
    with closing(decoded(entry)) as chunks:
        text = _Text(entry, chunks)
        if text.next() == "[":
            yield from _elements(text)
            return
    yield _whole(entry), ONLY_VALUE


class _Text:
    """The rest of a text whose beginning was read: as much of it as is needed at once."""

    def __init__(self, entry: Entry, chunks: Iterator[str]) -> None:
        self._entry, self._chunks = entry, chunks
        self._line, self._column = 1, 0  # of the text that follows
        self.text, self.at = "", 0

    def grow(self) -> bool:
        """Drops what was read, and doubles what is held of the rest. False if there is no more."""
        self._line, self._column = self._place(self.at)
        held = [self.text[self.at :]]
        self.at, length = 0, len(held[0])
        if length > self._entry.reading.limits.record:
            raise too_long(self._entry, f"a value in line {self._line:,}")
        wanted, before = 2 * length + 1, length
        while length < wanted and (chunk := next(self._chunks, "")):
            held.append(chunk)
            length += len(chunk)
        self.text = "".join(held)
        return length > before

    def _place(self, at: int) -> tuple[int, int]:
        """Returns the line and the column of a position, which count from 1 and 0."""
        newlines = self.text.count("\n", 0, at)
        start = self.text.rfind("\n", 0, at) + 1
        return self._line + newlines, at - start + (0 if newlines else self._column)

    def next(self) -> str:
        """Returns the next character that is not a space; "" at the end."""
        while True:
            spaces = SPACES.match(self.text, self.at)
            self.at = spaces.end() if spaces else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""

    def value(self) -> Any:
        """Returns the next value. Unusable if it is malformed."""
        while True:
            try:
                value, end = refusing_depth(DECODER.raw_decode, self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos + 64 > len(self.text)
                wrong = self.wrong(error)  # in terms of the text before it grows
                if not is_cut or not self.grow():
                    raise wrong from None
            except ValueError as error:
                raise self.wrong(error) from None
            else:
                if end < len(self.text):
                    self.at = end
                    return value
                if not self.grow():  # else a number may go on
                    self.at = len(self.text)
                    return value

    def wrong(self, error: ValueError) -> Unusable:
        """Returns the error for what is not JSON."""
        reason = _problem(error)
        if isinstance(error, json.JSONDecodeError):
            line, column = self._place(error.pos)
            at = json.JSONDecodeError(error.msg, " " * column, column)
            reason = f"{_problem(at)} of line {line:,}"
        return Unusable(self._entry.name, reason, "correct it, or leave it out")


def _elements(text: _Text) -> Iterator[Row]:
    """Yields the elements of an array, one at a time: it may be larger than memory."""
    mark, number = "[", 0
    while mark != "]":
        text.at += 1
        if number or text.next() != "]":
            number += 1
            text.next()
            activity.tick()
            yield text.value(), f"element {number:,}"
        mark = text.next()
        if mark not in ("]", ",") or not mark:
            raise text.wrong(json.JSONDecodeError("Expecting ',' delimiter", text.text, text.at))
    text.at += 1
    if text.next():
        raise text.wrong(json.JSONDecodeError("Extra data", text.text, text.at))


def _has_lines(entry: Entry) -> bool:
    """-> True if the first line that is not blank is a whole value, and another one follows."""
    with entry.reading.paused(), closing(decoded(entry)) as chunks:
        try:
            beginning = "".join(itertools.islice(chunks, 2))
            if "\n" not in beginning.lstrip() and "\r" not in beginning.lstrip():
                return False
            rows = (x for x in lines(entry, itertools.chain([beginning], chunks)) if x.strip())
            first = next(rows, "").lstrip()
            return first[:1] in OPENERS and next(rows, None) is not None and _is_value(first)
        except InputError:  # what is wrong is said by whoever reads it whole
            return False


def _is_value(line: str) -> bool:
    try:
        parsed(line)
    except DuplicateKey:
        return True
    except ValueError:
        return False
    return True


def _whole(entry: Entry) -> Any:
    """Returns the value of a JSON file."""
    try:
        return parsed(_text(entry))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno:,}"
        if error.msg == "Extra data":
            raise Unusable(
                entry.name,
                f"has more than one JSON value, the second in {where}",
                "write one value per line, or join them into an array",
            ) from None
        reason = f"{_problem(error)} of {where}"
    except ValueError as error:
        reason = _problem(error)
    raise Unusable(entry.name, reason, "correct it, or leave it out")


def _text(entry: Entry) -> str:
    longest = entry.reading.limits.whole
    chunks, length = [], entry.size or 0
    if length <= longest:
        length = 0
        for chunk in decoded(entry):
            length += len(chunk)
            if length > longest:
                break
            chunks.append(chunk)
    if length > longest:
        raise InputError(
            f"{entry.name} has more than {longest:,} bytes, and a .json file is read whole; "
            "convert it to .jsonl, with one value per line"
        )
    return "".join(chunks)


def _problem(error: ValueError) -> str:
    message = str(error)
    if isinstance(error, DuplicateKey):
        return f"has the key {shown(message, 60)!r} twice, with different values"
    if isinstance(error, json.JSONDecodeError):
        message = f"{error.msg.removesuffix(' at')} at column {error.colno:,}"
    return f"is not JSON: {shown(message[:1].lower() + message[1:])}"
