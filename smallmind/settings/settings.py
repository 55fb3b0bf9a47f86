"""Everything that describes a run, as one value that is saved as `config.json` and read back."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smallmind.checks import InputError, check_type, nearest, shown_value
from smallmind.settings.config import DistillationConfig, ModelConfig, RunConfig, TrainingConfig

FORMAT = 1  # of config.json

# Fields that earlier versions wrote under another name: old name -> current name.
RENAMED = {"windows_at_once": "micro_batch_size", "positions": "position"}


def current_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name, as any version wrote them -> the same fields under their current names."""
    return {RENAMED.get(name, name): value for name, value in fields.items()}


def from_saved(kind: Any, saved: Mapping[str, Any]) -> Any:
    """The fields of a config of this kind, as any version wrote them -> the config.

    TypeError or ValueError where they are something else.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"{shown_value(saved)} is not a JSON object")
    before = {field.name: field.metadata["before"] for field in dataclasses.fields(kind)}
    return kind(**{**before, **current_names(saved)})


def to_saved(config: Any) -> dict[str, Any]:
    """A config -> its fields as files hold them; those without a help text only if they are set."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    return {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if fields[name].metadata["help"] or value != fields[name].default
    }


def check_format(saved: Mapping[str, Any]) -> None:
    """InputError if a newer version wrote this config. Version 0.1.0 wrote no format number."""
    number = saved.get("format", FORMAT)
    if type(number) is not int or number > FORMAT:
        raise InputError(
            f"a newer smallmind wrote it, in format {shown_value(number)}; this version reads "
            f"formats up to {FORMAT}: upgrade smallmind"
        )


@dataclass(frozen=True)
class Settings:
    """Everything that describes a run: the model, its training, the run itself, a teacher."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                check_type(name, getattr(self, name), kind)  # which explains it

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Settings":
        """Fields of the four configs by name -> settings. No two configs share a field name.

        InputError for an unknown name or the first value that is out of range.
        """
        check_type("fields", fields, Mapping)
        _check_names(fields)
        sections = {name: _own(kind, fields) for name, kind in SECTIONS.items()}
        return cls(**{name: SECTIONS[name](**own) for name, own in sections.items()})

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Settings":
        """The settings that `to_dict` of this or an earlier version returned.

        Missing sections and fields take the values that versions without them used.
        InputError where a newer version wrote it; KeyError, TypeError or ValueError where it is
        something else.
        """
        check_type("saved", saved, Mapping)
        check_format(saved)
        return cls(
            **{name: from_saved(kind, saved.get(name, {})) for name, kind in SECTIONS.items()}
        )

    def to_dict(self) -> dict[str, Any]:
        """The format number, and section -> field -> value, JSON-able."""
        return {"format": FORMAT} | {name: to_saved(getattr(self, name)) for name in SECTIONS}

    @property
    def fields(self) -> dict[str, Any]:
        return {name: x for config in vars(self).values() for name, x in vars(config).items()}

    def replace(self, **fields: Any) -> "Settings":
        """Copies the settings with other values for these fields, whichever config has them.

        InputError for an unknown name or a value out of range.
        """
        _check_names(fields)
        changed = {
            name: dataclasses.replace(config, **own)
            for name, config in vars(self).items()
            if (own := _own(type(config), fields))
        }
        return dataclasses.replace(self, **changed)


SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "run": RunConfig,
    "distillation": DistillationConfig,
}


def _own(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}


def _check_names(fields: Mapping[str, Any]) -> None:
    """InputError for a name that no config has, suggesting the most similar one."""
    known = [field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise InputError(f"unknown setting {name!r}; did you mean {nearest(name, known)}?")
