"""Fields of settings that check themselves, and checks of arguments."""

import dataclasses
import functools
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Collection
from typing import Any


class InputError(ValueError):
    """Invalid input from the user; the message is one line that says what to do."""


def setting(
    default: Any,
    help: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Collection[str] = (),
    before: Any = dataclasses.MISSING,
    needs: tuple[Any, ...] = (),
) -> Any:
    """A field with its help text and allowed values.

    low <= value <= high, above < value < below, or one of choices, which may be a table that still
    grows. None is allowed where it is the default. `before` is what a file means that lacks the
    field; give it when the default changes. `needs` are the name of another field and those of its
    values with which this one matters.
    Whole numbers are always below 2**63, and those that a model's size or a loop depends on have a
    `high`: a file from anywhere must not make a command endless.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    before = default if before is dataclasses.MISSING else before
    metadata = {"help": help, "limits": limits, "choices": choices, "before": before}
    return dataclasses.field(default=default, metadata={**metadata, "needs": needs})


COMPARISONS: dict[str, tuple[str, Callable[[Any, float], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def check(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """value as a plain Python number, string or bool for this field.

    InputError naming the field, the value and what is allowed, if the value is not.
    """
    if value is None and field.default is None:
        return None
    is_several = field.type == str | tuple[str, ...] | None and isinstance(value, list | tuple)
    if is_several and value and all(isinstance(text, str) for text in value):
        texts = tuple(check(field, text) for text in value)
        return texts if len(texts) > 1 else texts[0]
    shown, choices = f"{field.name}={shown_value(value)}", field.metadata["choices"]
    if choices and not (isinstance(value, str) and value in choices):
        raise InputError(f"{shown} must be one of {', '.join(choices)}")
    if field.type is bool and not isinstance(value, bool):
        raise InputError(f"{shown} must be true or false")
    is_text = field.type in (str, str | None, str | tuple[str, ...] | None)
    if is_text and not isinstance(value, str):
        raise InputError(f"{shown} must be text in quotes")
    if isinstance(value, str) and not _is_unicode(value):
        raise InputError(f"{shown} is not valid UTF-8; rename it")
    if field.type not in (int, int | None, float, float | None):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{shown} must be a number")
    if field.type in (int, int | None) and not isinstance(value, numbers.Integral):
        raise InputError(f"{shown} must be a whole number")
    limits = field.metadata["limits"]
    if field.type in (int, int | None) and limits["high"] is None and limits["below"] is None:
        limits = {**limits, "below": 2**63}
    rules = [(*COMPARISONS[name], limits[name]) for name in COMPARISONS if limits[name] is not None]
    is_finite = field.type in (int, int | None) or _is_finite(value)
    if not is_finite or not all(holds(value, limit) for _, holds, limit in rules):
        words = [f"{word} {_number(limit)}" for word, _, limit in rules]
        if not is_finite and limits["high"] is None and limits["below"] is None:
            words.insert(0, "finite")
        raise InputError(f"{shown} must be {' and '.join(words)}")
    # JSON cannot hold NumPy's numbers.
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number of more than 308 digits
        return False


def _is_unicode(text: str) -> bool:
    """False for bytes of a file name or command line that are not UTF-8: lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def shown_value(value: Any) -> str:
    """A value in a message: what comes from a file may be of any size."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"(a number of about {round(value.bit_length() * math.log10(2))} digits)"
    return repr(value) if isinstance(value, str | numbers.Number) else reprlib.repr(value)


def check_type(name: str, value: Any, *kinds: type | None) -> Any:
    """value, if it is of one of these types, of which None is one. TypeError naming it otherwise.

    True and False are no numbers.
    """
    types = _types(kinds)
    if isinstance(value, types) and not (isinstance(value, bool) and bool not in types):
        return value
    wanted = " or ".join(_type_name(kind) for kind in kinds)
    shown = repr(value) if isinstance(value, int | float | str | None) else "an object"
    shown = f"{shown[:37]}..." if len(shown) > 40 else shown
    raise TypeError(f"{name} must be {wanted}, not {shown} of type {type(value).__name__}")


@functools.cache
def _types(kinds: tuple[type | None, ...]) -> tuple[type, ...]:
    return tuple(type(None) if kind is None else kind for kind in kinds)


def _type_name(kind: type | None) -> str:
    names: dict[Any, str] = {
        None: "None",
        numbers.Real: "a number",
        numbers.Integral: "a whole number",
    }
    return names.get(kind) or str(getattr(kind, "__name__", kind))


def _number(limit: float) -> str:
    """1.0 -> '1', 0.5 -> '0.5', 2**63 -> all its digits."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def check_field(config: type, name: str, value: Any) -> Any:
    """value as `check` returns it for the field with this name."""
    return check(next(f for f in dataclasses.fields(config) if f.name == name), value)


def check_all(config: Any) -> None:
    """Checks and normalises every field; InputError for the first invalid one."""
    for field in dataclasses.fields(config):
        value = check(field, getattr(config, field.name))
        object.__setattr__(config, field.name, value)
