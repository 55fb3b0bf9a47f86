"""JSON as other programs write it: numbers keep their digits, and what is not finite is missing."""

import ast
import json
import math
import re
import warnings
from typing import Any

OPENING = re.compile(r"\s*(?:array\(\s*)?[\[{]")
# Texts as Python writes them, and what it and NumPy write in other words than JSON: objects and
# texts side by side, arrays with a type, dates, and what is not a number.
TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
WORDS = re.compile(
    rf"""(?P<text>(?:{TEXT})(?=\s+['"])|\}}(?=\s+\{{))|(?P<same>{TEXT}|\\.)|(?P<array>\barray\()"""
    rf"""|(?P<kind>,\s*dtype=\w+(?=\)))|\bnan\b|\b(?:datetime\.\w+|Timestamp)\((?:{TEXT}|[^()'"])*\)""",
    re.DOTALL,
)
MAX_LITERAL = 2**22  # characters of Python, which takes a hundred times the memory


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


def opened(value: Any) -> Any:
    """Returns the list or object that a text holds, as JSON or as Python writes it; else the value.

    Cells of tables have such texts: `DataFrame.to_csv` writes lists as Python does.
    """
    if not isinstance(value, str) or not OPENING.match(value):
        return value
    try:
        return parsed(value)
    except DuplicateKey:
        return value
    except ValueError:
        pass
    if len(value) > MAX_LITERAL:
        return value
    try:
        with warnings.catch_warnings(action="ignore"):  # about backslashes in any other text
            return parsed(json.dumps(ast.literal_eval(WORDS.sub(_as_python, value.strip()))))
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return value


def _as_python(found: re.Match[str]) -> str:
    if found["text"] or found["same"]:
        return f"{found[0]}," if found["text"] else found[0]
    return "(" if found["array"] else "" if found["kind"] else "None"


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
