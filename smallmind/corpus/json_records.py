"""JSON: a value per line, or a whole file that is an array of records or one record."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.json_values import DuplicateKey, parsed
from smallmind.corpus.reading import Unusable, shown
from smallmind.corpus.records import Records, lines
from smallmind.corpus.shapes import ONLY_VALUE, Row

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
    value = _whole(entry)
    elements = value if isinstance(value, list) else [value]
    for number, element in enumerate(elements, 1):
        activity.tick()
        yield element, f"element {number:,}" if elements is value else ONLY_VALUE


def _has_lines(entry: Entry) -> bool:
    """-> True if the first line that is not blank is a whole value, and another one follows."""
    with entry.reading.paused():
        rows = (line for line in lines(entry, decoded(entry)) if not line.isspace())
        try:
            with closing(rows):
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
