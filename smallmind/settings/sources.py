"""Fields by name, the flags that set them, and files that do.

All are dictionaries from field to value, as no two configs share a field name.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from smallmind.checks import InputError, check, from_json, nearest
from smallmind.settings.config import ModelConfig
from smallmind.settings.presets import Fields
from smallmind.settings.settings import SECTIONS, check_format, current_names, from_saved

FIELDS = {
    field.name: (section, field)
    for section, config in SECTIONS.items()
    for field in dataclasses.fields(config)
}
# Nobody chooses them: what they follow from.
FOLLOWING = {
    **dict.fromkeys(("vocab_size", "document_token", "bigram_vocab"), "the text"),
    "lengths": "the minutes",
}
# Parts that changed nothing in three rounds of measurements: only a program or a file sets them.
WITHOUT_GAIN = ("x0_scalars", "zero_init", "logit_softcap")
# Not reused from a saved run: these depend on its text, its directory or its machine.
RUN_SPECIFIC = (*FOLLOWING, "out", "threads", "minutes")
MAX_BYTES = 1_000_000  # of a file of settings
# The length of a run, and of its warmup: setting one of them overrides all three.
ALTERNATIVES = {
    "length of the run": ("steps", "epochs", "minutes"),
    "warmup": ("warmup_steps", "warmup_share", "warmup_epochs"),
}
# Fields by which a text becomes tokens, of some kinds of tokenizer only.
OF_TOKENIZER = tuple(
    name for name, (_, field) in FIELDS.items() if "tokenizer" in field.metadata["needs"][:1]
)
MODEL_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}


def flag_of(name: str) -> str:
    """Returns the flag of the command line that sets a field."""
    flag = FIELDS[name][1].metadata["flag"] if name in FIELDS else ""
    return flag or "--" + name.replace("_", "-")


def flags_of(fields: Fields) -> str:
    """Returns the flags that set these fields, as in "--n-layer 2 --no-bias"."""
    words = []
    for name, value in fields.items():
        flag = flag_of(name)
        if name in WITHOUT_GAIN:
            words.append(f"{name}={value}")
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-"))
        else:
            words.append(f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}")
    return " ".join(words)


def without_effect(name: str, values: Fields) -> str | None:
    """Returns why a field changes nothing beside these values of others; None if it does."""
    other, *needed = FIELDS[name][1].metadata["needs"] or (None,)
    if other is None or values[other] in needed:
        return None
    actual, flag = values[other], flag_of(other)
    unless = "" if actual in (None, False) else f" with {flag} {actual}"
    words = [flag if needed == [True] else f"{flag} {needed[0]}", *needed[1:]]
    either = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return f"{flag_of(name)} has no effect{unless}; it needs {either}"


def read_settings(file: Path) -> Fields:
    """Returns the fields in a TOML file with the SECTIONS, or in the config.json of a run.

    InputError names the file, the key and its value, and for an unknown key the most similar one.
    """
    content = _read(file)
    try:
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        text = content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        if is_saved(file):
            return _reusable(from_json(text))
        sections = tomllib.loads(text).items()
        return {key: x for name, keys in sections for key, x in _checked(name, keys).items()}
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except (RecursionError, TypeError, ValueError) as error:  # the first by TOML
        kind = "the config.json of a run" if is_saved(file) else "TOML in UTF-8"
        raise InputError(f"{file} is not {kind}: {_reason(error, file, content)}") from None


def is_saved(file: Path) -> bool:
    """Returns True if a file of settings is the config.json of a run, which has all of them."""
    return file.suffix == ".json"


def _reason(error: Exception, file: Path, content: bytes) -> str:
    """Returns why a file of settings cannot be read, and what to do if it has another encoding."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        from smallmind.files.encoding import advice  # takes milliseconds to import

        return advice(str(file), content, file.suffix)
    return " ".join(str(error).split())  # a key may be a line break


def _read(file: Path) -> bytes:
    """Returns the start of a file, as long as settings may be and one byte more."""
    from smallmind.files import durable  # takes milliseconds to import

    try:
        with durable.open_regular(file) as opened:
            return opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"cannot read {file}: {error}") from None


def _reusable(config: Any) -> Fields:
    """config, as saved by any version -> its fields, without what is specific to that run."""
    if not isinstance(config, dict) or not config.keys() & SECTIONS.keys():
        raise ValueError("it has no section 'model'")
    check_format(config)
    fields: Fields = {}
    for section, kind in SECTIONS.items():
        if not isinstance(saved := config.get(section, {}), dict):
            raise ValueError(f"its {section!r} is not a JSON object")
        fields |= vars(from_saved(kind, saved))
    if fields["text"] or not fields["chat"]:  # another text may have conversations, or none
        fields["chat"] = None
    return {key: x for key, x in fields.items() if key not in RUN_SPECIFIC and x is not None}


def _checked(section: str, keys: Any) -> Fields:
    """Returns the fields of a section; InputError for the first that is unknown or invalid."""
    if section in SECTIONS and not isinstance(keys, dict):
        raise InputError(f"{section}={keys!r} must be a section, [{section}]")
    if not isinstance(keys, dict):
        raise InputError(f"{section}={keys!r} is outside any section; {_nearest_key(section)}")
    if section not in SECTIONS:
        similar = nearest(section, SECTIONS)
        raise InputError(f"unknown section [{section}]; did you mean [{similar}]?")
    settings = {}
    for key, value in current_names(keys).items():
        owner, field = FIELDS.get(key, ("", None))
        if field is None or owner != section:
            raise InputError(f"unknown key {key} in [{section}]; {_nearest_key(key)}")
        if key in FOLLOWING:
            raise InputError(f"{key}={value!r} follows from {FOLLOWING[key]}; leave it out")
        settings[key] = check(field, value)
    return settings


def _nearest_key(word: str) -> str:
    key = str(nearest(word, FIELDS))
    return f"did you mean {key} in [{FIELDS[key][0]}]?"
