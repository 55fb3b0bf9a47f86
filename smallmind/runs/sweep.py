"""The plan of a sweep: which runs a folder is to hold, and with which settings. Needs no NumPy."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from smallmind.checks import InputError, check_type, from_json, shown_value, whole
from smallmind.files import durable

PLAN = "sweep.json"
FORMAT = 1  # of that file
MAX_BYTES = 10_000_000
MAX_RUNS = 10_000
UNSAFE = re.compile(r"[^\w.=,+-]+")  # in names of directories
MAX_NAME = 100  # characters


class PlannedRun(NamedTuple):
    """A run of a sweep: its directory in the folder, and its settings by the names of the flags."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class SweepPlan:
    """The runs of a sweep, and the paths of their text; without any, the built-in stories."""

    text: tuple[str, ...]
    runs: tuple[PlannedRun, ...]

    @classmethod
    def of(cls, text: Sequence[str], values: Mapping[str, Sequence[Any]]) -> "SweepPlan":
        """Returns a run for every combination of the values of each setting.

        InputError if that makes only one run, or too many.
        """
        values = {name: list(dict.fromkeys(each)) for name, each in values.items()}
        count = 1
        for each in values.values():
            count *= len(each)
        if count < 2:
            raise InputError(
                "a sweep needs two runs or more: give a flag several values, as in "
                "--learning-rate 1e-3,3e-3, or --seeds 3"
            )
        if count > MAX_RUNS:
            raise InputError(f"these values make {count:,} runs; the limit is {MAX_RUNS:,}")
        combined = [
            dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
        ]
        return cls(tuple(text), _named(combined, {}))

    @property
    def varied(self) -> list[str]:
        """The names of the settings that differ between runs; the seed comes last."""
        names = dict.fromkeys(name for run in self.runs for name in run.settings)
        every = [run.settings for run in self.runs]
        return sorted(
            (name for name in names if any(x.get(name) != every[0].get(name) for x in every)),
            key=lambda name: name == "seed",
        )

    def extended(self, wanted: "SweepPlan") -> "SweepPlan":
        """-> the plan that has these runs, under their names, and those that `wanted` has besides.

        InputError if `wanted` lacks some of them, or has another text.
        """
        if wanted.text != self.text:
            raise InputError(f"was made of another text: {', '.join(self.text) or 'the stories'}")
        names = {_key(run.settings): run.name for run in self.runs}
        lost = names.keys() - {_key(run.settings) for run in wanted.runs}
        if lost:
            name = next(run.name for run in self.runs if _key(run.settings) in lost)
            raise InputError(f"has runs that these flags do not name, such as {name}")
        return SweepPlan(self.text, _named([run.settings for run in wanted.runs], names))

    def save(self, folder: Path) -> None:
        """Writes it to a folder, in one line per run."""
        runs = ",\n  ".join(json.dumps(run._asdict(), ensure_ascii=False) for run in self.runs)
        text = json.dumps(self.text, ensure_ascii=False)
        content = f'{{"format": {FORMAT}, "text": {text}, "runs": [\n  {runs}\n]}}\n'
        durable.write(folder / PLAN, [content.encode("utf-8", "replace")])

    @classmethod
    def read(cls, folder: str | PathLike[str]) -> "SweepPlan":
        """-> the plan in a folder. InputError if there is none, or a newer version wrote it."""
        file = Path(folder) / PLAN
        with durable.explained(file, "plan of a sweep"):
            saved = from_json(durable.read(file, MAX_BYTES))
            try:
                version = whole(saved["format"], 1)
                if version > FORMAT:
                    raise InputError(
                        f"{file} has format {version}, of a newer smallmind: update this one"
                    )
                text = [check_type("text", path, str) for path in saved["text"]]
                runs = [_checked(each) for each in saved["runs"]]
            except (KeyError, TypeError) as error:
                raise ValueError(f"{type(error).__name__}: {error}") from None
            if len({run.name for run in runs}) < len(runs) or not runs:
                raise ValueError("its runs have no names of their own")
        return cls(tuple(text), tuple(runs))


def is_sweep(folder: str | PathLike[str]) -> bool:
    """Returns True if a folder holds a sweep."""
    return (Path(folder) / PLAN).is_file()


def _checked(run: Any) -> PlannedRun:
    """Returns a run of a file. TypeError, KeyError or ValueError if it is malformed."""
    name = check_type("name", run["name"], str)
    if UNSAFE.search(name) or name in ("", ".", ".."):
        raise ValueError(f"{shown_value(name)} is not a name of a run")
    settings = check_type("settings", run["settings"], dict)
    return PlannedRun(name, {key: check_type(key, x, *VALUES) for key, x in settings.items()})


VALUES = (str, int, float, bool, None)  # the types of settings


def _key(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """settings -> a key that is equal for equal ones."""
    return tuple(sorted(settings.items()))


def _named(
    every: Sequence[dict[str, Any]], names: Mapping[tuple[tuple[str, Any], ...], str]
) -> tuple[PlannedRun, ...]:
    """Names runs with these settings: as in `names`, others by what differs."""
    varied = SweepPlan((), tuple(PlannedRun("", settings) for settings in every)).varied
    taken, runs = set(names.values()), []
    for settings in every:
        name = names.get(_key(settings))
        if name is None:
            text = label(settings, varied).replace(" ", ",")
            name = base = UNSAFE.sub("_", text)[:MAX_NAME].strip(".") or "run"
            for number in itertools.count(2):
                if name not in taken:
                    break
                name = f"{base}-{number}"
            taken.add(name)
        runs.append(PlannedRun(name, settings))
    return tuple(runs)


def label(settings: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Says how a run differs: learning_rate=0.001 n_embd=64 seed=1337."""
    return " ".join(f"{name}={shown(settings.get(name))}" for name in varied)


def shown(value: Any) -> str:
    """Returns a setting, briefly."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
