"""JSON: a value per line, or a whole file that is an array of records or one record."""

import json
from collections.abc import Iterator
from typing import Any

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.reading import shown
from smallmind.corpus.records import Records, Row, lines


def read_json_lines(entry: Entry) -> Iterator[Piece]:
    """A JSON value per line, each with a document; blank lines are left out."""
    records = Records(entry)
    for row in json_lines(entry):
        yield from records.pieces(*row)


def read_json(entry: Entry) -> Iterator[Piece]:
    """An array with a document in each element, or a single record. It is read whole."""
    records = Records(entry)
    for row in json_elements(entry):
        yield from records.pieces(*row)


def json_lines(entry: Entry) -> Iterator[Row]:
    """The value of each line that is not blank.

    InputError naming the file and the line for one that is not JSON.
    """
    for number, line in enumerate(lines(entry, decoded(entry)), 1):
        if line.isspace():
            continue
        where = f"line {number:,}"
        try:
            value = _parsed(line.rstrip("\r\n"))
        except ValueError as error:
            raise InputError(
                f"{entry.name}: {where} is not JSON: {_reason(error)}; correct or remove that line"
            ) from None
        yield value, where


def json_elements(entry: Entry) -> Iterator[Row]:
    """The elements of an array, or the only value. InputError if it is too large, or not JSON."""
    value = _whole(entry)
    elements = value if isinstance(value, list) else [value]
    for number, element in enumerate(elements, 1):
        activity.tick()
        yield element, f"element {number:,}" if elements is value else "its only value"


def _whole(entry: Entry) -> Any:
    """The value of a JSON file."""
    text = _text(entry)
    try:
        return _parsed(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise InputError(
                f"{entry.name} has more than one JSON value, the second in line "
                f"{error.lineno:,}; if it has one per line, rename it to .jsonl"
            ) from None
        reason = f"{_reason(error)} of line {error.lineno:,}"
    except ValueError as error:
        reason = _reason(error)
    raise InputError(f"{entry.name} is not JSON: {reason}; correct it, or leave it out")


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


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _reason(error: ValueError) -> str:
    message = str(error)
    if isinstance(error, json.JSONDecodeError):
        message = f"{error.msg.removesuffix(' at')} at column {error.colno:,}"
    return shown(message[:1].lower() + message[1:])
