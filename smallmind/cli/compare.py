"""Compare runs: which settings differ, and the losses at equal steps and equal times."""

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smallmind.checks import InputError
from smallmind.cli.console import Console, full_width, shorten
from smallmind.cli.flags import add_runs, runs_of
from smallmind.cli.plot import LABELS, check_count
from smallmind.cli.runs import UNKNOWN, show_rows
from smallmind.console.activity import duration
from smallmind.console.table import Table
from smallmind.runs.sweep import shown

if TYPE_CHECKING:
    from smallmind.views.comparison import Losses, TaskComparison

VALUE_WIDTH = 24  # characters of a setting
SHORT_SECONDS = 100.0  # shorter times have a decimal
TITLES = {
    "val_loss": "Held-out loss, nats per token",
    "bits_per_byte": "Held-out loss, bits per byte",
    "loss": "Training loss, smoothed, nats per token",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind compare`."""
    add_runs(parser, "directories of two or more runs, or their names in runs/")
    parser.epilog = (
        "Losses are compared at steps and times that all runs have reached, interpolated between "
        "evaluations; where there are none, the best held-out loss of each run is shown. * marks "
        "the lowest. Times include evaluations. Runs whose tokens differ are compared by bits per "
        "byte. Runs may still be training. Results of tasks (`evaluate --pairs` and the like) are "
        "compared item by item. Runs that differ only in their seed form one group; differences "
        "within its spread are not reported as such."
    )


def run(options: argparse.Namespace) -> int:
    """Prints tables: the runs, the settings that differ, their losses."""
    from smallmind.views.comparison import (
        COMPARED,
        TEXT,
        compare,
        compare_tasks,
        compared_field,
        differences,
        lowest,
    )
    from smallmind.views.listing import row_of
    from smallmind.views.run_view import open_view

    paths = runs_of(options) if options.run_names else []
    if len(paths) < 2:
        raise InputError("name two runs or more: smallmind compare RUN RUN")
    check_count(paths)
    views = [open_view(path, COMPARED) for path in paths]
    console = Console()
    rows = [row_of(view) for view in views]
    labelled = zip(LABELS, rows, strict=False)
    show_rows(console, [row | {"name": f"{mark} {row['path']}"} for mark, row in labelled])
    for row in rows:
        if row["problem"]:
            console.line(f"{row['path']}: {row['problem']}")
    differing = differences(views)
    console.line()
    if differing:
        console.line("Settings that differ")
        cells = [[name, *map(_value, values)] for name, values in differing.items()]
        _show(console, "setting", cells)
    else:
        console.line("All settings are the same")
    if TEXT in differing:
        console.line("The texts differ: a lower loss may only mean an easier text")
    chosen = compared_field(views, differing)
    # Runs that were evaluated at other times can still be compared by their training losses.
    fields = (chosen, "loss") if chosen == "val_loss" else (chosen,)
    for axis, head, places in (("steps", "step", "steps"), ("time", "time", "times")):
        console.line()
        for field in fields:
            losses = compare(views, field, axis)
            if losses.places:
                console.line(f"{TITLES[field]}, at equal {places}")
                _show(console, head, _loss_cells(losses, axis))
                break
            console.line(f"{TITLES[field]}: the runs have no {places} in common")
            if axis == "steps" and field != "loss":
                _show_lowest(console, field, lowest(views, field))
    _show_tasks(console, compare_tasks(views, differing))
    return 0


def _show_tasks(console: Console, compared: "Sequence[TaskComparison]") -> None:
    """Shows the results of tasks, and for each which differences are more than chance."""
    title = ""
    for task, measure, shares, changes in compared:
        if task != title:
            console.line()
            console.line(f"{task}, % correct with 95% intervals")
            title = task
        _show(console, "", [[measure, *(x.shown() if x else UNKNOWN for x in shares)]])
        for before, after, interval in changes:
            names = [", ".join(LABELS[i] for i in numbers) for numbers in (after, before)]
            console.line(f"{' vs. '.join(names)}: {interval.told()}")


def _show_lowest(
    console: Console, field: str, found: Sequence[tuple[float, int, float] | None]
) -> None:
    """Shows the lowest loss of each run, wherever that was; nothing if no run has one."""
    points = [point for point in found if point]
    if not points:
        return
    best, last = min(points)[0], max(seconds for _, _, seconds in points)
    columns = [("loss", "steps", "time")]
    for point in found:
        loss, step, seconds = point or (math.nan, 0, 0.0)
        mark = "*" * (loss == best and len(points) > 1)
        cells = f"{mark}{loss:.4f}", f"{step:,}", _place(seconds, "time", last)
        columns.append(cells if point else (UNKNOWN, UNKNOWN, UNKNOWN))
    console.line(f"Best {TITLES[field][0].lower()}{TITLES[field][1:]}")
    _show(console, "", list(zip(*columns, strict=True)))


def _show(console: Console, head: str, rows: Sequence[Sequence[str]]) -> None:
    """Shows a table with a column for each run, in several parts if it is too wide."""
    table = Table("", rows, [head, *LABELS[: len(rows[0]) - 1]])
    for part in table.parts(Table.columns, full_width()):
        console.drawing(part)


def _loss_cells(losses: "Losses", axis: str) -> list[list[str]]:
    cells = []
    for place, values in zip(losses.places, losses.values, strict=True):
        known = [x for x in values if x is not None]
        lowest = min(known) if len(set(known)) > 1 else None
        row = [UNKNOWN if x is None else f"{'*' * (x == lowest)}{x:.4f}" for x in values]
        cells.append([_place(place, axis, losses.places[-1]), *row])
    return cells


def _place(place: float, axis: str, last: float) -> str:
    """Returns a step, or a time in seconds or hours, minutes and seconds."""
    if axis == "steps":
        return f"{place:,.0f}"
    return f"{place:.1f} s" if last < SHORT_SECONDS else duration(place)


def _value(value: Any) -> str:
    """Returns a setting, briefly."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else shown(value)
    return shorten(text, VALUE_WIDTH)
