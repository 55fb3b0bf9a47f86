"""Where the settings of a run come from: named sizes, named presets, a file, and flags.

All are dictionaries from field to value, as no two of the four configs share a field name.
"""

import dataclasses
import difflib
import json
import tomllib
from pathlib import Path
from typing import Any

from smallmind.checks import InputError, check
from smallmind.settings import SECTIONS, check_format, current_names, from_saved

Fields = dict[str, Any]

FIELDS = {
    field.name: (section, field)
    for section, config in SECTIONS.items()
    for field in dataclasses.fields(config)
}
# Not reused from a saved run: these depend on its text, its directory or its machine.
RUN_SPECIFIC = ("vocab_size", "out", "threads", "minutes")
MAX_BYTES = 1_000_000  # of a file of settings
# The length of a run: setting one of them overrides all three.
LENGTHS = ("steps", "epochs", "minutes")

# Each has about six times the parameters of the one before.
SIZES: dict[str, Fields] = {
    "nano": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 12},
    "tiny": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12},
    "small": {"n_layer": 6, "n_head": 4, "n_embd": 256, "block_size": 128, "batch_size": 12},
    "medium": {
        "n_layer": 8,
        "n_head": 8,
        "n_embd": 512,
        "block_size": 256,
        "batch_size": 8,
        # The larger the model, the lower the rate (Brown et al. 2020, table 2.1).
        "learning_rate": 6e-4,
    },
}

# Published ones, and what learns fastest at these sizes: `bench recipe` measures it.
ARCHITECTURES: dict[str, Fields] = {
    "gpt2": {
        "norm": "layernorm",
        "position": "learned",
        "mlp": "gelu",
        "bias": True,
        "qk_norm": False,
        "value_residual": False,
        "x0_scalars": False,
        "bigram_rows": 0,
        "zero_init": False,
        "logit_softcap": 0.0,
    },
}
ARCHITECTURES["llama"] = ARCHITECTURES["gpt2"] | {
    "norm": "rmsnorm",
    "position": "rope",
    "mlp": "swiglu",
    "bias": False,
}
ARCHITECTURES["modern"] = ARCHITECTURES["llama"] | {
    "mlp": "relu2",
    "qk_norm": True,
    "value_residual": True,
    "x0_scalars": True,
    "bigram_rows": 2**14,
    "zero_init": True,
}

PRESETS: dict[str, Fields] = {
    # Exercises every part of a run (warmup, accumulation, evaluation) in seconds.
    "test": {
        "steps": 100,
        "warmup_steps": 10,
        "batch_size": 2,
        "grad_accum_steps": 2,
        "val_every": 50,
        "val_batches": 5,
    },
    # Long, with 32 to 64 windows per update at every size, and evaluations with little noise.
    "production": {
        "steps": 5000,
        "warmup_steps": 100,
        "min_lr": 1e-6,
        "grad_accum_steps": 4,
        "max_grad_norm": 1.0,
        "val_every": 500,
        "val_batches": 50,
    },
}


def resolve(
    size: str | None = None,
    preset: str | None = None,
    file: Path | None = None,
    flags: Fields | None = None,
    arch: str | None = None,
) -> Fields:
    """The fields that size, arch, preset, file and flags set; later ones override earlier ones.

    Fields that none of them sets are absent. InputError for an invalid file, or one that sets
    everything that size or preset would.
    """
    named = [
        SIZES[size] if size else {},
        ARCHITECTURES[arch] if arch else {},
        PRESETS[preset] if preset else {},
    ]
    from_file = read_settings(file) if file else {}
    given_by = f"--size {size}", f"--arch {arch}", f"--preset {preset}"
    for flag, settings in zip(given_by, named, strict=True):
        if settings and settings.keys() <= from_file.keys():
            raise InputError(
                f"{flag} would change nothing: {file} sets everything it does; leave out one of "
                "the two"
            )
    flags = flags or {}
    if len(given := [name for name in LENGTHS if flags.get(name)]) > 1:
        raise InputError(
            f"--{given[0]} and --{given[1]} both set the length of the run; give only one"
        )
    resolved: Fields = {}
    for source in (*named, from_file, flags):
        if any(name in source for name in LENGTHS):
            resolved = {name: value for name, value in resolved.items() if name not in LENGTHS}
        resolved |= source
    return resolved


def read_settings(file: Path) -> Fields:
    """The fields in a TOML file with the SECTIONS, or in the config.json of a run.

    InputError names the file, the key and its value, and for an unknown key the most similar one.
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
    content = _read(file)
    try:
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        text = content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        return _reusable_sections(json.loads(text)) if is_saved_run else tomllib.loads(text)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except (RecursionError, TypeError, ValueError) as error:
        kind = "the config.json of a run" if is_saved_run else "TOML in UTF-8"
        raise InputError(f"{file} is not {kind}: {_reason(error, file, content)}") from None


def _reason(error: Exception, file: Path, content: bytes) -> str:
    """Why a file of settings cannot be read, and what to do if it has another encoding."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        from smallmind.text.encoding import advice  # takes milliseconds to import

        return advice(str(file), content, file.suffix)
    return str(error)


def _read(file: Path) -> bytes:
    """The start of a file, as long as settings may be and one byte more."""
    from smallmind import durable  # takes milliseconds to import

    try:
        with durable.open_regular(file) as opened:
            return opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"cannot read {file}: {error}") from None


def _reusable_sections(config: Any) -> dict[str, Any]:
    """config, as saved by any version -> its sections, without what is specific to that run."""
    if not isinstance(config, dict) or not config.keys() & SECTIONS.keys():
        raise ValueError("it has no section 'model'")
    check_format(config)
    sections = {}
    for section in SECTIONS:
        fields = config.get(section, {})
        if not isinstance(fields, dict):
            raise ValueError(f"its {section!r} is not a JSON object")
        sections[section] = {
            key: value
            for key, value in vars(from_saved(SECTIONS[section], fields)).items()
            if key not in RUN_SPECIFIC and value is not None
        }
    return sections


def _checked(section: str, keys: Any) -> Fields:
    """The fields of a section; InputError for the first that is unknown or invalid."""
    if section in SECTIONS and not isinstance(keys, dict):
        raise InputError(f"{section}={keys!r} must be a section, [{section}]")
    if not isinstance(keys, dict):
        raise InputError(f"{section}={keys!r} is outside any section; {_nearest_key(section)}")
    if section not in SECTIONS:
        nearest = _nearest(section, SECTIONS)
        raise InputError(f"unknown section [{section}]; did you mean [{nearest}]?")
    settings = {}
    for key, value in current_names(keys).items():
        owner, field = FIELDS.get(key, ("", None))
        if field is None or owner != section:
            raise InputError(f"unknown key {key} in [{section}]; {_nearest_key(key)}")
        if key == "vocab_size":
            raise InputError(f"vocab_size={value!r} follows from the text; leave it out")
        settings[key] = check(field, value)
    return settings


def _nearest_key(word: str) -> str:
    key = _nearest(word, FIELDS)
    return f"did you mean {key} in [{FIELDS[key][0]}]?"


def _nearest(word: str, known: dict[str, Any]) -> str:
    return difflib.get_close_matches(word, known, n=1, cutoff=0)[0]
