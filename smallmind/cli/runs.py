"""List runs with their progress, their losses and their state."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smallmind.cli.console import Console, full_width, shorten
from smallmind.console.activity import duration
from smallmind.console.table import GAP, Table
from smallmind.runs.files import RUNS
from smallmind.runs.sweep import is_sweep

UNKNOWN = "-"
MAX_NOTES = 5  # runs about which there is more to say


class Column(NamedTuple):
    """A column of the table, and when it goes: the highest number first; 0: never.

    Those that tell runs apart stay longest.
    """

    head: str
    cell: Callable[[dict[str, Any]], str]
    goes: int
    side: str = ">"


def steps_of(row: dict[str, Any]) -> str:
    """Returns the steps done, of those planned if these are more: 1,250/2,000."""
    planned = "" if row["steps"] in (None, row["step"]) else f"/{row['steps']:,}"
    return f"{row['step']:,}{planned}"


def format_count(count: int | None) -> str:
    """Returns a number of parameters, roughly: 113K, 4.85M, 124M."""
    if count is None:
        return UNKNOWN
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.9995 * size:  # which rounds up to it
            return f"{count / size:.3g}{unit}"
    return str(count)


def number(value: float | None, digits: int) -> str:
    """Returns a number with this many decimals, or a mark that it is unknown."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


COLUMNS = (
    Column("name", lambda row: row["name"], 0, side="<"),
    Column("text", lambda row: shorten(row["text"] or UNKNOWN, 20), 2, side="<"),
    Column("model", lambda row: row["architecture"] or UNKNOWN, 3, side="<"),
    Column("parameters", lambda row: format_count(row["parameters"]), 8),
    Column("steps", steps_of, 4),
    Column("best held-out", lambda row: number(row["best_loss"], 4), 1),
    Column("final held-out", lambda row: number(row["final_loss"], 4), 6),
    Column("bits/byte", lambda row: number(row["bits_per_byte"], 3), 7),
    Column("time", lambda row: duration(row["seconds"]), 5),
    Column("state", lambda row: row["state"], 0, side="<"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind runs`."""
    from smallmind.views.listing import SORT_KEYS

    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path(RUNS),
        metavar="DIR",
        help="directory that holds the runs (runs)",
    )
    parser.add_argument(
        "--sort",
        choices=SORT_KEYS,
        default="created",
        metavar="COLUMN",
        help=f"sort by {', '.join(SORT_KEYS)} (created: the newest comes last)",
    )
    parser.add_argument("--reverse", action="store_true", help="sort in descending order")
    parser.add_argument("--json", action="store_true", help="print a JSON array, for programs")
    parser.epilog = (
        "best held-out: the lowest loss of a run's evaluations, on some batches of the held-out "
        "text; final held-out: the loss on all of it, at the end; both in nats per token. "
        "bits/byte: at the end, or until then at the best evaluation. Compare losses only between "
        "runs with the same text and tokens, bits per byte between runs with the same text. A run "
        "that was killed or stopped is interrupted: smallmind train --resume RUN continues it."
    )


def run(options: argparse.Namespace) -> int:
    """Prints the table, as wide as the terminal."""
    from smallmind.views.listing import dated, find_runs, row_of, sort_rows

    console = Console()
    rows = [row_of(view) for view in find_runs(options.directory)]
    rows = sort_rows(rows, options.sort, options.reverse)
    if options.json:
        console.piece(json.dumps([dated(row) for row in rows], indent=2) + "\n")
        return 0
    sweeps = [path for path in sorted(options.directory.iterdir()) if is_sweep(path)]
    if not rows and not sweeps:
        console.line(f"No runs in {options.directory} yet; `smallmind train` makes one")
        return 0
    if rows:
        show_rows(console, rows)
    for path in sweeps:
        console.line(f"{path} is a sweep: `smallmind runs {path}` lists its runs")
    notes = [(row["name"], row["failure"] or row["problem"]) for row in rows]
    notes = [(name, note) for name, note in notes if note]
    for name, note in notes[:MAX_NOTES]:
        console.line(f"{name}: {note}")
    if (more := len(notes) - MAX_NOTES) > 0:
        console.line(f"{more} more failed or cannot be read: --json shows why")
    return 0


def show_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Shows the table, without the columns for which the terminal is too narrow."""
    columns, width = list(COLUMNS), full_width()
    cells = {column: [column.cell(row) for row in rows] for column in columns}

    def width_of(column: Column) -> int:
        return max(map(len, [column.head, *cells[column]]))

    def too_much() -> int:
        return sum(map(width_of, columns)) + len(GAP) * (len(columns) - 1) - width

    while too_much() > 0 and any(column.goes for column in columns):
        columns.remove(max(columns, key=lambda column: column.goes))
    if (excess := too_much()) > 0:
        name = columns[0]
        width_left = max(8, width_of(name) - excess)
        cells[name] = [shorten(cell, width_left) for cell in cells[name]]
    heads = [column.head for column in columns]
    sides = "".join(column.side for column in columns)
    lines = list(zip(*(cells[column] for column in columns), strict=True))
    console.drawing(Table("", lines, heads, sides).columns())
    if left_out := [column.head for column in COLUMNS if column not in columns]:
        console.line(f"Columns hidden (terminal too narrow): {', '.join(left_out)}")
