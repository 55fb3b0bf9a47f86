"""Everything that describes a run, as one value that is saved as `config.json` and read back."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

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


def check_format(saved: Mapping[str, Any]) -> None:
    """InputError if a newer version wrote this config. Version 0.1.0 wrote no format number."""
    number = saved.get("format", FORMAT)
    if type(number) is not int or number > FORMAT:
        raise InputError(
            f"a newer smallmind wrote it, in format {shown_value(number)}; this version reads "
            f"formats up to {FORMAT}: upgrade smallmind"
        )


class Origin(NamedTuple):
    """The source of a field: a rule, and its sentence; or a preset, a file or a person."""

    by: str
    why: str = ""


CHOSEN = Origin("chosen")  # by a flag, or an argument of a program


@dataclass(frozen=True)
class Settings:
    """Everything that describes a run: the model, its training, the run itself, a teacher."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                check_type(name, getattr(self, name), kind)  # which explains it

    @classmethod
    def from_fields(
        cls, fields: Mapping[str, Any], origins: Mapping[str, Origin] = MappingProxyType({})
    ) -> "Settings":
        """Fields of the four configs by name -> settings. No two configs share a field name.

        `origins` say what has set them, if that was not a person. InputError for an unknown name or
        the first value that is out of range.
        """
        check_type("fields", fields, Mapping)
        _check_names(fields)
        sections = {name: fields_of(kind, fields) for name, kind in SECTIONS.items()}
        configs = {name: SECTIONS[name](**own) for name, own in sections.items()}
        return cls(**configs, origins=origins)

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
        return {"format": FORMAT} | {
            name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS
        }

    @property
    def fields(self) -> dict[str, Any]:
        return {name: x for section in SECTIONS for name, x in vars(getattr(self, section)).items()}

    def explain(self) -> dict[str, Origin]:
        """Returns what has set each field that is not a plain default, by its name.

        Settings that were read from a run say "chosen" of each: only a new run knows more.
        """
        plain = {x.name: x.default for kind in SECTIONS.values() for x in dataclasses.fields(kind)}
        changed = [name for name, value in self.fields.items() if value != plain[name]]
        return {name: self.origins.get(name, CHOSEN) for name in changed}

    def replace(self, by: Origin = CHOSEN, /, **fields: Any) -> "Settings":
        """Copies the settings with other values for these fields, whichever config has them.

        `by` is what `explain` says of them. InputError for an unknown name or a value out of range.
        """
        _check_names(fields)
        changed = {
            name: dataclasses.replace(getattr(self, name), **own)
            for name, config in SECTIONS.items()
            if (own := fields_of(config, fields))
        }
        origins = {**self.origins, **dict.fromkeys(fields, by)}
        return dataclasses.replace(self, **changed, origins=origins)


SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "run": RunConfig,
    "distillation": DistillationConfig,
}


def fields_of(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those fields that a config of this kind has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}


def _check_names(fields: Mapping[str, Any]) -> None:
    """InputError for a name that no config has, suggesting the most similar one."""
    known = [field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise InputError(f"unknown setting {name!r}; did you mean {nearest(name, known)}?")
