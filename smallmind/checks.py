"""Settings that check themselves, and checks of arguments and of what files hold."""

import dataclasses
import functools
import inspect
import json
import math
import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Collection
from typing import Any, TypeVar

MAX_DIGITS = 300  # of a number in JSON: a float holds it
MAX_MEASURED = 1e30  # nothing that a run measures gets there
MAX_CHARACTERS = 4096  # characters of a setting: no system has longer paths
MAX_SHOWN = 80  # characters of a value in a message


class InputError(ValueError):
    """Invalid input from the user; the message is one line that says what to do."""


def environment_number(name: str, low: int) -> int | None:
    """-> a whole number in an environment variable, None without it."""
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if number < low:
        raise InputError(
            f"{name}={text!r} in the environment must be a whole number of at least {low}, or unset"
        )
    return number


def from_json(text: str | bytes, strict: bool = True) -> Any:
    """JSON text -> value. ValueError if it is malformed or nested too deeply.

    With strict also for a key that appears twice, and a number that is not finite or no float
    holds. Otherwise such a number is NaN or infinite, as in metrics, which may have them.
    """
    hooks: dict[str, Any] = {"parse_int": _whole_or_infinite}
    if strict:
        hooks = {"parse_int": _whole, "parse_float": _finite, "parse_constant": _finite}
        hooks["object_pairs_hook"] = _table
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **hooks)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _whole_or_infinite(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number in JSON has {len(digits):,} digits")
    return int(digits)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key appears twice in one JSON object")
    return table


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number in JSON is not finite")
    return value


def whole(value: Any, low: int = 0, meaning: str = "") -> int:
    """Returns value, a whole number of a file. ValueError unless low <= value < 2**63."""
    if type(value) is not int or not low <= value < 2**63:  # True is an int too
        wanted = meaning or f"a whole number of at least {low}"
        raise ValueError(f"{shown_value(value)} is not {wanted}")
    return value


def number(value: Any) -> float:
    """Returns a number that a run has measured; NaN for anything else that a file may hold."""
    is_number = type(value) in (int, float) and abs(value) < MAX_MEASURED
    return float(value) if is_number else math.nan


def count_of(number: float, thing: str, things: str | None = None) -> str:
    """1, "file" -> "1 file"; 1200, "file" -> "1,200 files"; `things` are several, if not so."""
    several = f"{thing}s" if things is None else things
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {thing if number == 1 else several}"


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
    flag: str = "",
    metavar: str = "",
) -> Any:
    """Returns a field with its help text and allowed values.

    low <= value <= high, above < value < below, or one of choices, which may be a table that still
    grows. None is allowed where it is the default. `before` is what a file means that lacks the
    field; give it when the default changes. `needs` are the name of another field and those of its
    values with which this one matters. `flag` is how the command line calls it, and `metavar` its
    value there, if not after its name and type.
    Whole numbers are always below 2**63, and those that a model's size or a loop depends on have a
    `high`: a file from anywhere must not make a command endless.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    before = default if before is dataclasses.MISSING else before
    metadata = {"help": help, "limits": limits, "choices": choices, "before": before}
    metadata |= {"needs": needs, "flag": flag, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


COMPARISONS: dict[str, tuple[str, Callable[[Any, float], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def check(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Returns value as a plain Python value for this field. InputError if it is not allowed."""
    if value is None and field.default is None:
        return None
    is_several = field.type == str | tuple[str, ...] | None and isinstance(value, list | tuple)
    if is_several and value and all(isinstance(text, str) for text in value):
        texts = tuple(check(field, text) for text in value)
        return texts if len(texts) > 1 else texts[0]
    shown, choices = f"{field.name}={shown_value(value)}", field.metadata["choices"]
    if choices and not (isinstance(value, str) and value in choices):
        raise InputError(f"{shown} must be one of {', '.join(choices)}")
    if field.type in (bool, bool | None) and not isinstance(value, bool):
        raise InputError(f"{shown} must be true or false")
    is_text = field.type in (str, str | None, str | tuple[str, ...] | None)
    if is_text and not isinstance(value, str):
        raise InputError(f"{shown} must be text in quotes")
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise InputError(f"{shown} has {len(value):,} characters, more than {MAX_CHARACTERS:,}")
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
    """-> False for bytes of a file name or command line that are not UTF-8: lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def shown_value(value: Any) -> str:
    """Returns a value in a message: what comes from a file may be of any size."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"(a number of about {round(value.bit_length() * math.log10(2))} digits)"
    if not isinstance(value, str | numbers.Number):
        return reprlib.repr(value)
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def check_type(name: str, value: Any, *kinds: type | None) -> Any:
    """Returns value if it is of one of these types; True and False are no numbers. TypeError."""
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
    """Returns value as `check` does for the field with this name."""
    return check(next(f for f in dataclasses.fields(config) if f.name == name), value)


def check_all(config: Any) -> None:
    """Checks and normalises every field; InputError for the first invalid one."""
    for field in dataclasses.fields(config):
        value = check(field, getattr(config, field.name))
        object.__setattr__(config, field.name, value)


def nearest(word: str, known: Collection[str], cutoff: float = 0.0) -> str | None:
    """Returns the most similar of the known words; None if the similarity of all is below cutoff.

    One whose initials the word is comes first: lr means learning_rate.
    """
    import difflib  # takes milliseconds to import

    for one in known:
        if len(word) > 1 and word == "".join(part[:1] for part in one.split("_")):
            return one
    return next(iter(difflib.get_close_matches(word[:MAX_SHOWN], known, n=1, cutoff=cutoff)), None)


Public = TypeVar("Public", bound=Callable[..., Any])


def suggesting(*configs: type, names: Collection[str] = ()) -> Callable[[Public], Public]:
    """-> a decorator: for an unknown argument, TypeError names the nearest.

    `configs` are those whose fields a function takes as keywords, too, and `names` other ones.
    """

    def decorate(public: Public) -> Public:
        function = public.__init__ if isinstance(public, type) else public  # type: ignore[misc]

        @functools.wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except TypeError:
                _check_arguments(public, configs, names, named)
                raise

        if not isinstance(public, type):
            return wrapper  # type: ignore[return-value]
        public.__init__ = wrapper  # type: ignore[misc]
        return public

    return decorate


def _check_arguments(
    public: Callable[..., Any],
    configs: tuple[type, ...],
    names: Collection[str],
    named: Collection[str],
) -> None:
    """Raises TypeError for the first name that neither the function nor a config has."""
    parameters = inspect.signature(public).parameters.values()
    known = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    known += names
    known += [field.name for config in configs for field in dataclasses.fields(config)]
    for name in named:
        if name not in known:
            raise TypeError(
                f"unknown argument {shown_value(name)} of {public.__name__}; did you mean "
                f"{nearest(name, known)}?"
            ) from None
