"""JSON as other programs write it: numbers keep their digits, and what is not finite is missing."""

import json
import math
from typing import Any


class Number(float):
    """A number that is shown with the digits of its file, such as 0.10 or 1E5."""

    digits: str

    def __new__(cls, digits: str) -> "Number":
        number = super().__new__(cls, digits)
        number.digits = digits
        return number

    def __repr__(self) -> str:
        return self.digits

    __str__ = __repr__


class DuplicateKey(ValueError):
    """A key that one JSON object has twice, with different values: either may be meant."""


def parsed(text: str) -> Any:
    """JSON text -> its value, in which NaN, Infinity and numbers that no float holds are None.

    ValueError if it is malformed or nested too deeply, DuplicateKey if it is ambiguous.
    """
    try:
        try:
            value, end = SCAN(text, 0)
            if end == len(text) or text[end:].isspace():
                return value
        except (StopIteration, json.JSONDecodeError):  # spaces may be before the value
            pass
        return DECODER.decode(text.rstrip("\r\n"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite(digits: str) -> Number | None:
    """Returns the number with these digits; None if it is not finite."""
    number = Number(digits)
    return number if math.isfinite(number) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        for name, value in pairs:
            if fields[name] != value:
                raise DuplicateKey(name)
    return fields


DECODER = json.JSONDecoder(
    parse_float=finite,
    parse_int=lambda digits: Number(digits) if digits == "-0" else int(digits),
    parse_constant=lambda _: None,
    object_pairs_hook=_object,
)
SCAN: Any = vars(DECODER)["scan_once"]  # what `raw_decode` calls, without its own time


def has_text(value: Any) -> bool:
    """Returns True for text other than a number, anywhere in a value."""
    waiting = [value]  # a recursive search could exceed the stack: files nest as they like
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            if value.strip() and not _is_number(value):
                return True
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return False


def _is_number(text: str) -> bool:
    if len(text) > 40:
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True
