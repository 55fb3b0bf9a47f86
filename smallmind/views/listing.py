"""The runs in a directory, a row each."""

import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind.checks import InputError
from smallmind.views.run_view import RunView, State, finite

Row = dict[str, Any]  # see `row_of`
# A word to sort runs by -> the field of a row.
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
LAST_DATE = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC).timestamp()  # four digits


def find_runs(parent: str | PathLike[str]) -> list[RunView]:
    """Returns the runs below a directory, or the one that it is itself, without curves.

    InputError if there is no such directory.
    """
    directory = Path(parent)
    if not directory.is_dir():
        raise InputError(f"{parent} does not exist; `smallmind train` makes runs in runs/")
    if (view := RunView(directory, fields=())).is_run:
        return [view]
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError as error:
        raise InputError(f"cannot read {parent}: {error.strerror}") from None
    return [view for path in paths if (view := RunView(path, fields=())).is_run]


def row_of(view: RunView) -> Row:
    """Returns the row of a run: its fields by name, None for what is unknown, or not yet known."""
    best, final, state = view.best or {}, view.final or {}, view.state
    bits = final.get("final_bits_per_byte", best.get("bits_per_byte"))
    return {
        "name": view.name,
        "path": str(view.path),
        "created": view.created if 0 <= view.created < LAST_DATE else None,  # seconds since 1970
        "state": state.value,
        "text": view.text,
        "architecture": view.architecture,
        "parameters": view.parameters,
        "step": view.step,  # done
        "steps": view.steps,  # planned
        # The lowest held-out loss, in nats per token; without evaluations, the final one.
        "best_loss": finite(best.get("val_loss", final.get("final_loss"))),
        "best_step": best.get("step"),
        "final_loss": finite(final.get("final_loss")),  # on the whole held-out text
        "bits_per_byte": finite(bits),  # the final ones, before the end those of the best
        "seconds": view.seconds,  # of training
        "failure": view.failure if state == State.FAILED else None,  # why it has failed
        "problem": view.problem,  # why fields are missing
    }


def sort_rows(rows: list[Row], by: str, reverse: bool = False) -> list[Row]:
    """Returns the rows by one of SORT_KEYS, ascending; those without a value come last."""
    field = SORT_KEYS[by]
    known = [row for row in rows if row[field] is not None]
    others = [row for row in rows if row[field] is None]
    return sorted(known, key=lambda row: (row[field], row["name"]), reverse=reverse) + others


def dated(row: Row) -> Row:
    """Returns a row for JSON, with `created` in ISO 8601."""
    if row["created"] is None:
        return row
    moment = datetime.datetime.fromtimestamp(row["created"], datetime.UTC)
    return row | {"created": moment.isoformat(timespec="seconds")}
