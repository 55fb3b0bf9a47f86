"""The runs in a directory, a row each."""

import datetime
import math
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind.checks import InputError, number
from smallmind.views.run_view import RunView, State

# A word to sort runs by -> the field of RunRow.
SORT_KEYS = {
    "created": "created",
    "name": "name",
    "text": "text",
    "model": "architecture",
    "parameters": "parameters",
    "steps": "step",
    "loss": "best_loss",
    "bits": "bits_per_byte",
    "time": "seconds",
    "state": "state",
}


LAST = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC).timestamp()  # a date has four digits


@dataclass(frozen=True)
class RunRow:
    """A run's row in a table. None means unknown, or not yet known."""

    name: str
    path: str
    created: float | None  # seconds since 1970
    state: str
    text: str | None
    architecture: str | None
    parameters: int | None
    step: int  # done
    steps: int | None  # planned
    best_loss: float | None  # the lowest on held-out text, in nats per token
    best_step: int | None
    bits_per_byte: float | None  # of that evaluation
    seconds: float  # of training
    failure: str | None  # why it has failed
    problem: str | None  # why fields are missing

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, JSON-able; `created` in ISO 8601."""
        fields = asdict(self)
        if self.created is not None:
            moment = datetime.datetime.fromtimestamp(self.created, datetime.UTC)
            fields["created"] = moment.isoformat(timespec="seconds")
        return fields


def find_runs(parent: str | PathLike[str]) -> list[RunView]:
    """The runs below a directory, or the one that it is itself, without curves.

    InputError if there is no such directory.
    """
    directory = Path(parent)
    if not directory.is_dir():
        raise InputError(f"{parent} does not exist; `smallmind train` makes runs in runs/")
    own = RunView(directory, fields=())
    if own.is_run:
        return [own]
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError as error:
        raise InputError(f"cannot read {parent}: {error.strerror}") from None
    return [view for view in (RunView(path, fields=()) for path in paths) if view.is_run]


def row_of(view: RunView) -> RunRow:
    """Returns the row of a run."""
    best = view.best or {}
    loss, bits = best.get("val_loss"), best.get("bits_per_byte")
    if not best and view.final:
        loss, bits = view.final.get("final_loss"), view.final.get("final_bits_per_byte")
    state = view.state
    return RunRow(
        name=view.name,
        path=str(view.path),
        created=view.created if 0 <= view.created < LAST else None,
        state=state.value,
        text=view.text,
        architecture=view.architecture,
        parameters=view.parameters,
        step=view.step,
        steps=view.steps,
        best_loss=_finite(loss),
        best_step=best.get("step"),
        bits_per_byte=_finite(bits),
        seconds=view.seconds,
        failure=view.failure if state == State.FAILED else None,
        problem=view.problem,
    )


def sort_rows(rows: list[RunRow], by: str, reverse: bool = False) -> list[RunRow]:
    """The rows by one of SORT_KEYS, ascending; those without a value come last."""
    field = SORT_KEYS[by]
    known = [row for row in rows if getattr(row, field) is not None]
    others = [row for row in rows if getattr(row, field) is None]
    return sorted(known, key=lambda row: (getattr(row, field), row.name), reverse=reverse) + others


def _finite(value: Any) -> float | None:
    return found if math.isfinite(found := number(value)) else None
