"""Runs of the same choices one after another, each of which teaches the next.

A small text gains more from a student of the same size than from further passes over it
(born-again networks, Furlanello et al. 2018); what it gains is in `bench/LOG.md`.
"""

import dataclasses
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from smallmind import parts
from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.losses.teacher_settings import DistillationConfig
from smallmind.runs.files import CONFIG, TOKENIZER, default_directory, name_of, paths_of
from smallmind.runs.run import Run
from smallmind.settings.config import NEUTRAL, Precision
from smallmind.settings.presets import Fields
from smallmind.settings.rules import Choices
from smallmind.settings.settings import PLAIN, fields_of
from smallmind.settings.sources import flag_of

ALPHA, TEMPERATURE = 0.7, 1.0  # of a student of the same size, measured
LEAST_MINUTES = 0.01  # of a generation, if those before it have taken all the time
EXCLUDED = ("teacher", "teacher_cache", "init_from", "loss", "reward")
OF_TEACHERS = [field.name for field in dataclasses.fields(DistillationConfig)]
FREE = ("text", "minutes", "threads", *NEUTRAL)  # what a repeated command may change


def directories(choices: Choices, count: int) -> list[Path]:
    """-> the directories of all generations; the last one is what the choices name."""
    chosen = choices.chosen
    out = chosen.get("out")
    last = Path(out or default_directory(name_of(chosen.get("text"), bool(chosen.get("chat")))))
    names = [f"{last.name}-generation-{number}" for number in range(1, count)]
    return [*map(last.with_name, names), last]


def generations(
    choices: Choices, paths: Sequence[Path], start: float
) -> Generator[tuple[Run, bool], None, None]:
    """Yields each run, and True for a new one, for the caller to train before the next one.

    Ends after a run that is not finished then. One that an earlier call has left in its directory
    is opened. New ones divide what is left of the `minutes`, which count from `start`; each has a
    seed of its own, and the tokens and windows of its teacher. InputError if a model cannot teach
    the next one, or a directory holds a run of other choices.
    """
    _check(choices)
    chosen = {name: x for name, x in choices.chosen.items() if name not in OF_TEACHERS}
    alone = dataclasses.replace(choices, chosen=chosen)  # those of the first, without a teacher
    seed, minutes = alone.settings().run.seed, choices.chosen.get("minutes")
    left = [path for path in paths if not _is_finished(path)]
    end = start + 60 * (minutes or 0) * len(left) / len(paths)
    teacher: Run | None = None
    for i, path in enumerate(paths):
        taught = _taught_by(teacher, choices) if teacher else {}
        now = (choices if teacher else alone).having(out=str(path), seed=seed + i, **taught)
        if (path / CONFIG).exists():
            run, is_new = Run.open(path), False
            _check_same(run, now.chosen)
        else:
            if minutes:
                seconds = (end - start) / len(left)
                now = now.having(minutes=max(LEAST_MINUTES, round(seconds / 60, 2)))
            run, is_new = Run.of(now), True
        yield run, is_new
        if not run.is_finished:
            return
        start, teacher = activity.clock(), run
        left = [other for other in left if other != path]


def _is_finished(path: Path) -> bool:
    return (path / CONFIG).exists() and Run.open(path).is_finished


def _check(choices: Choices) -> None:
    """Raises InputError for a choice that a teacher excludes, or one about it that is wrong."""
    for name in EXCLUDED:
        if choices.chosen.get(name) not in PLAIN:
            raise InputError(
                f"--generations trains from scratch, each time with the model before as the "
                f"teacher: leave out {flag_of(name)}"
            )
    of_teachers = fields_of(DistillationConfig, choices.chosen)
    DistillationConfig("", **of_teachers)


def _taught_by(teacher: Run, choices: Choices) -> dict[str, Any]:
    """-> the fields of a student, besides its directory and its seed."""
    settings, chosen = teacher.settings, choices.chosen
    fields: dict[str, Any] = {"alpha": ALPHA, "temperature": TEMPERATURE}
    # A vocabulary that was learned is taken as it is; the other kinds follow from the text.
    kind = settings.run.tokenizer
    is_learned = kind not in parts.TOKENIZERS or parts.load(parts.TOKENIZERS, kind).is_learned
    fields["tokenizer"] = str(teacher.path / TOKENIZER) if is_learned else kind
    if chosen.get("minutes"):  # which may choose longer windows than the teacher has
        fields["block_size"] = settings.model.block_size
    fields = {name: value for name, value in fields.items() if name not in chosen}
    return {"teacher": str(teacher.path), **fields}


def _check_same(run: Run, chosen: Fields) -> None:
    """Raises InputError if a run was created with other choices than these."""
    saved = run.settings.fields
    for name, value in chosen.items():
        now = saved[name]
        # Rules replace the others.
        if name in FREE or now is None or value in (None, Precision.AUTO):
            continue
        if value != now and str(Path(str(value)).resolve()) != str(Path(str(now)).resolve()):
            raise InputError(
                f"{run.path} was created with {flag_of(name)} {now}, not {value}: use the same "
                "flags, or choose another --out"
            )
    texts = [str(Path(path).resolve()) for path in paths_of(chosen.get("text"))]
    if texts != paths_of(run.settings.run.text):
        raise InputError(f"{run.path} was created with another text: choose another --out")
