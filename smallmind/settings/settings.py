"""Everything that describes a run, as one value that is saved as `config.json` and read back."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from smallmind import parts
from smallmind.checks import InputError, check_type, nearest, shown_value
from smallmind.settings.config import ModelConfig, RunConfig, TrainingConfig

FORMAT = 1  # of config.json
ONLY_IF_SET = ("part_settings",)  # fields that files hold only then: most models have none

LOSS_SETTINGS: dict[str, Any] = {
    name: parts.load(parts.LOSS_SETTINGS, name) for name in parts.LOSS_SETTINGS
}
SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "run": RunConfig,
    **LOSS_SETTINGS,
}

PLAIN = None, "cross-entropy"  # values of the field by which a loss is chosen, where none is

# Names of the numbers of losses in the metrics -> title in a report, and format.
LOSS_RECORDS = {k: x for kind in LOSS_SETTINGS.values() for k, x in kind.records.items()}

# Fields that earlier versions wrote under another name: old name -> current name.
RENAMED = {"windows_at_once": "micro_batch_size", "positions": "position"}


def current_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name, as any version wrote them -> the same fields under their current names."""
    return {RENAMED.get(name, name): value for name, value in fields.items()}


def from_saved(kind: Any, saved: Mapping[str, Any]) -> Any:
    """Fields of a config, as any version wrote them -> the config. TypeError or ValueError."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"{shown_value(saved)} is not a JSON object")
    before = {field.name: field.metadata["before"] for field in dataclasses.fields(kind)}
    return kind(**{**before, **current_names(saved)})


def to_saved(config: Any) -> dict[str, Any]:
    """A config -> its fields as files hold them."""
    fields = dataclasses.asdict(config).items()
    return {name: value for name, value in fields if value or name not in ONLY_IF_SET}


def check_format(saved: Mapping[str, Any]) -> None:
    """Raises InputError if a newer version wrote this config; 0.1.0 wrote no number."""
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
    """Everything that describes a run: the model, its training, the run itself, its loss.

    `losses` are the settings of each loss that has some, by its name in `parts.LOSSES`; they are
    attributes under this name, too.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    losses: Mapping[str, Any] = field(
        default_factory=lambda: {name: kind() for name, kind in LOSS_SETTINGS.items()}, hash=False
    )
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            if not isinstance(self.sections[name], kind):
                check_type(name, self.sections[name], kind)  # which explains it

    def __getattr__(self, name: str) -> Any:
        if name in LOSS_SETTINGS:
            return self.losses[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def sections(self) -> dict[str, Any]:
        """The configs by the names of their sections."""
        return {name: getattr(self, name) for name in SECTIONS}

    @property
    def loss(self) -> tuple[str, Any]:
        """The name of the loss of the run, in `parts.LOSSES`, and its settings or None."""
        for name, config in self.losses.items():
            if getattr(config, config.chosen_by) not in PLAIN:
                return name, config
        return "cross-entropy", None

    @classmethod
    def from_fields(
        cls, fields: Mapping[str, Any], origins: Mapping[str, Origin] = MappingProxyType({})
    ) -> "Settings":
        """Fields of the configs by name, which no two share -> settings. InputError if wrong."""
        check_type("fields", fields, Mapping)
        _check_names(fields)
        sections = {name: kind(**fields_of(kind, fields)) for name, kind in SECTIONS.items()}
        return cls._of(sections, origins)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Settings":
        """Returns the settings that `to_dict` of this or an earlier version returned.

        Missing sections and fields take the values that versions without them used.
        InputError where a newer version wrote it; KeyError, TypeError or ValueError where it is
        something else.
        """
        check_type("saved", saved, Mapping)
        check_format(saved)
        sections = SECTIONS.items()
        return cls._of({name: from_saved(kind, saved.get(name, {})) for name, kind in sections})

    @classmethod
    def _of(
        cls, sections: dict[str, Any], origins: Mapping[str, Origin] = MappingProxyType({})
    ) -> "Settings":
        losses = {name: sections.pop(name) for name in LOSS_SETTINGS}
        return cls(**sections, losses=losses, origins=origins)

    def to_dict(self) -> dict[str, Any]:
        """The format number, and section -> field -> value, JSON-able."""
        return {"format": FORMAT} | {name: to_saved(x) for name, x in self.sections.items()}

    @property
    def fields(self) -> dict[str, Any]:
        return {name: x for config in self.sections.values() for name, x in vars(config).items()}

    def explain(self) -> dict[str, Origin]:
        """Returns what has set each field that is not a plain default; "chosen" in a saved run."""
        plain = {x.name: x.default for kind in SECTIONS.values() for x in dataclasses.fields(kind)}
        changed = [name for name, value in self.fields.items() if value != plain[name]]
        return {name: self.origins.get(name, CHOSEN) for name in changed}

    def replace(self, by: Origin = CHOSEN, /, **fields: Any) -> "Settings":
        """Copies the settings with other values; `by` is what `explain` says of them."""
        _check_names(fields)
        changed = {
            name: dataclasses.replace(config, **changes) if changes else config
            for name, config in self.sections.items()
            for changes in [fields_of(type(config), fields)]
        }
        return self._of(changed, {**self.origins, **dict.fromkeys(fields, by)})


def new_files(fields: Mapping[str, Any]) -> dict[str, Path]:
    """Fields of settings -> the files that the loss of a run creates, by the fields for them."""
    names = (name for kind in LOSS_SETTINGS.values() for name in kind.creates)
    paths = {name: Path(path) for name in names if (path := fields.get(name))}
    return {name: path for name, path in paths.items() if not os.path.lexists(path)}


def fields_of(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those fields that a config of this kind has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}


def _check_names(fields: Mapping[str, Any]) -> None:
    """Raises InputError for a name that no config has, suggesting the most similar one."""
    known = [field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise InputError(f"unknown setting {name!r}; did you mean {nearest(name, known)}?")
