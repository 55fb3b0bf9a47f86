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
from smallmind.corpus.json_values import DECODER, DuplicateKey, parsed
from smallmind.corpus.reading import Unusable, shown
from smallmind.corpus.records import Records, lines, too_long
from smallmind.corpus.shapes import CONTAINER, ONLY_VALUE, Row, is_record

# Before the first element of an array and before others, after the last, and an array without any.
FIRST, NEXT = re.compile(r"[ \t\n\r]*\[[ \t\n\r]*"), re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
END, EMPTY = re.compile(r"[ \t\n\r]*\][ \t\n\r]*"), re.compile(r"[ \t\n\r]*\[\s*\]\s*")
# An object up to the elements of its first list, after fields with a text or a number.
OPENED = re.compile(
    r'\s*\{(?:\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,)*\s*"[^"\\]*"\s*:\s*\[\s*'
)
OPENERS = tuple('{["')  # that lines of JSON begin with


def read_json_lines(entry: Entry) -> Iterator[Piece]:
    """Returns a document for each line with a JSON value; blank lines are left out."""
    return Records(entry).documents(json_lines(entry))


def read_json(entry: Entry) -> Iterator[Piece]:
    """Returns a document for each element of an array, or a single one. It is read whole."""
    return Records(entry).documents(json_elements(entry))


def json_lines(entry: Entry) -> Iterator[Row]:
    """Yields the value of each line that is not blank. Unusable, naming one that is not JSON."""
    for number, line in enumerate(lines(entry), 1):
        if line.isspace():
            continue
        where = f"line {number:,}"
        try:
            value = parsed(line)
        except ValueError as error:
            is_open = isinstance(error, json.JSONDecodeError) and line.lstrip().startswith("[")
            if number == 1 and is_open:  # an array over several lines
                yield from json_elements(entry)
                return
            advice = "correct or remove that line"
            raise Unusable(entry.name, _problem(error), advice, where) from None
        yield value, where


def json_elements(entry: Entry) -> Iterator[Row]:
    """Yields the elements of an array as they come, or the only value, or the value of each line.

    Of a large object with a list of records, such as {"data": [...]}, it yields these. Unusable if
    it is not JSON, InputError if it is too large.
    """
    if _has_lines(entry):
        entry.reading.note("read JSON with one value per line")
        yield from json_lines(entry)
        return
    text, number, wanted, before, opened = "", 0, 0, FIRST, ""
    with closing(decoded(entry)) as chunks:
        for chunk in itertools.chain(chunks, [""]):
            text, at = text + chunk, 0
            if text.lstrip()[:1] not in ("[", "") and not number:
                if chunk and len(text) <= entry.reading.limits.piece:
                    continue
                before, opened = OPENED, _opened(entry, text) if chunk else ""
                if not opened:  # it is read whole
                    break
            if len(text) <= wanted and chunk:  # a long element is not tried too often
                continue
            while found := before.match(text, at):
                try:
                    value, end = DECODER.raw_decode(text, found.end())
                except (ValueError, RecursionError):
                    break
                if end == len(text):  # a number may go on
                    break
                at, number, before = end, number + 1, NEXT
                activity.tick()
                where = f"record {number:,} of {ONLY_VALUE}" if opened else f"element {number:,}"
                yield value, where
            text = text[at:]
            wanted = 2 * len(text)
            if len(text) > entry.reading.limits.record:
                raise too_long(entry, f"element {number + 1:,}")
    if opened and number:
        rest = _parsed(entry, opened + text)
        entry.reading.note(f"read {CONTAINER.words}")
        entry.reading.note_unread(rest, ())
    elif not (END if number else EMPTY).fullmatch(text):
        yield _parsed(entry, _text(entry)), ONLY_VALUE  # or it says what is wrong in an array


def _opened(entry: Entry, text: str) -> str:
    """-> an object up to the first element of its list of records; "" if it may be another one."""
    found = OPENED.match(text)
    if not found:
        return ""
    try:
        fields, first = parsed(f"{found[0]}]}}"), DECODER.raw_decode(text, found.end())[0]
    except (ValueError, RecursionError):
        return ""
    is_list = CONTAINER.match(fields) and entry.reading.field not in fields
    return found[0] if is_list and is_record(first) else ""


def _has_lines(entry: Entry) -> bool:
    """-> True if the first line that is not blank is a whole value, and another one follows."""
    with entry.reading.paused(), closing(decoded(entry)) as chunks:
        try:
            beginning = "".join(itertools.islice(chunks, 2))
            if "\n" not in beginning.lstrip() and "\r" not in beginning.lstrip():
                return False
            rows = (x for x in lines(entry, itertools.chain([beginning], chunks)) if x.strip())
            first = next(rows, "").lstrip()
            if first[:1] not in OPENERS or next(rows, None) is None:
                return False
            parsed(first)
        except DuplicateKey:
            return True
        except (InputError, ValueError):  # what is wrong is said by whoever reads it whole
            return False
        return True


def _parsed(entry: Entry, text: str) -> Any:
    try:
        return parsed(text)
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
