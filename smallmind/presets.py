"""Where the settings of a run come from: named sizes, named runs, a file, and flags over all.

Fields are a dictionary of fields, whose names are distinct over the four configs.
"""

import dataclasses
import difflib
import json
import tomllib
from pathlib import Path
from typing import Any

from smallmind.config import SECTIONS, InputError, check

Fields = dict[str, Any]

FIELDS = {
    field.name: (section, field)
    for section, config in SECTIONS.items()
    for field in dataclasses.fields(config)
}
# Not taken from a saved run: they say which text it was, where it wrote and on which machine.
OF_ONE_RUN = ("vocab_size", "out", "threads", "minutes")
# How long a run is: what is set over one of them leaves the others behind.
LENGTHS = ("steps", "epochs", "minutes")

# Each has about six times the parameters of the one before.
SIZES: dict[str, Fields] = {
    "nano": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 12},
    "tiny": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12},
    "small": {"n_layer": 6, "n_head": 4, "n_embd": 256, "block_size": 128, "batch_size": 12},
    # The larger the model, the lower the rate (Brown et al. 2020, table 2.1).
    "medium": {
        "n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 256, "batch_size": 8,
        "learning_rate": 6e-4,
    },
}  # fmt: skip

PRESETS: dict[str, Fields] = {
    # Every part of a run at work (warmup, accumulation, evaluation), over in seconds.
    "test": {
        "steps": 100, "warmup_steps": 10, "batch_size": 2, "grad_accum_steps": 2,
        "val_every": 50, "val_batches": 5,
    },
    # Long, with 32 to 64 windows an update at every size, and evaluations that vary little.
    "production": {
        "steps": 5000, "warmup_steps": 100, "min_lr": 1e-6, "grad_accum_steps": 4,
        "max_grad_norm": 1.0, "val_every": 500, "val_batches": 50,
    },
}  # fmt: skip


def resolve(
    size: str | None = None,
    preset: str | None = None,
    file: Path | None = None,
    flags: Fields | None = None,
) -> Fields:
    """What is set by size, preset, file and flags, each over the one before it.

    What none of them sets is left to the defaults of the configs. InputError for a file that is
    wrong, or that sets all of what size or preset would.
    """
    named = [SIZES[size] if size else {}, PRESETS[preset] if preset else {}]
    from_file = read_settings(file) if file else {}
    for flag, settings in zip((f"--size {size}", f"--preset {preset}"), named, strict=True):
        if settings and settings.keys() <= from_file.keys():
            raise InputError(
                f"{flag} would change nothing, as {file} sets all of it; leave one of the two out"
            )
    flags = flags or {}
    if len(given := [name for name in LENGTHS if flags.get(name)]) > 1:
        raise InputError(f"--{given[0]} and --{given[1]} both say how long the run is; give one")
    resolved: Fields = {}
    for source in (*named, from_file, flags):
        if any(name in source for name in LENGTHS):
            resolved = {name: value for name, value in resolved.items() if name not in LENGTHS}
        resolved |= source
    return resolved


def read_settings(file: Path) -> Fields:
    """A TOML file with the SECTIONS, or the config.json of a run.

    InputError names the file, the key and its value, and for an unknown key the nearest known one.
    """
    settings: Fields = {}
    for section, keys in _sections(file).items():
        try:
            settings |= _checked(section, keys)
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
    return settings


def _sections(file: Path) -> dict[str, Any]:
    is_saved_run = file.suffix == ".json"
    try:
        # utf-8-sig: with or without the mark that some editors begin a file with.
        text = file.read_text(encoding="utf-8-sig")
        return _of_saved_run(json.loads(text)) if is_saved_run else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        kind = "the config.json of a run" if is_saved_run else "TOML in UTF-8"
        raise InputError(f"{file} is not {kind}: {error}") from None


def _of_saved_run(config: Any) -> dict[str, Any]:
    """What another run can have in common with the one that saved this."""
    sections = {}
    for section in SECTIONS:
        if not isinstance(config, dict) or not isinstance(config.get(section), dict):
            raise InputError(f"it has no section {section}")
        sections[section] = {
            key: value
            for key, value in config[section].items()
            if key not in OF_ONE_RUN and value is not None
        }
    return sections


def _checked(section: str, keys: Any) -> Fields:
    """The settings of a section; InputError for the first that is unknown or wrong."""
    if section in SECTIONS and not isinstance(keys, dict):
        raise InputError(f"{section}={keys!r} must be a section, [{section}]")
    if not isinstance(keys, dict):
        raise InputError(f"{section}={keys!r} is in no section; {_nearest_key(section)}")
    if section not in SECTIONS:
        nearest = _nearest(section, SECTIONS)
        raise InputError(f"unknown section [{section}]; the nearest known one is [{nearest}]")
    settings = {}
    for key, value in keys.items():
        home, field = FIELDS.get(key, ("", None))
        if field is None or home != section:
            raise InputError(f"unknown key {key} in [{section}]; {_nearest_key(key)}")
        if key == "vocab_size":
            raise InputError(f"vocab_size={value!r} follows from the text; leave it out")
        settings[key] = check(field, value)
    return settings


def _nearest_key(word: str) -> str:
    key = _nearest(word, FIELDS)
    return f"the nearest known one is {key} in [{FIELDS[key][0]}]"


def _nearest(word: str, known: dict[str, Any]) -> str:
    return difflib.get_close_matches(word, known, n=1, cutoff=0)[0]
