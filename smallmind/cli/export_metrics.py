"""Write the metrics of a run as a CSV table."""

import argparse
import sys
from pathlib import Path

from smallmind.checks import InputError, count_of
from smallmind.cli.console import Console
from smallmind.cli.flags import add_run, check_writable, run_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind export-metrics`."""
    add_run(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.csv", help="file to write; default: standard output"
    )


def run(options: argparse.Namespace) -> int:
    """Writes the table; notes about it go to the standard error output."""
    if options.out:
        if options.out.suffix != ".csv":
            raise InputError(f"--out: {options.out} must end in .csv")
        check_writable("--out", options.out)
    from smallmind.runs.files import METRICS
    from smallmind.runs.metrics import read_metrics

    directory = run_of(options)
    table = read_metrics(directory)
    if options.out:
        # Half a character, which UTF-8 cannot hold, is written as in JSON: \ud800.
        options.out.write_text(table.to_csv(), encoding="utf-8", errors="backslashreplace")
    else:
        Console().piece(table.to_csv())
    notes = Console(sys.stderr)
    if table.unreadable:
        lines = ", ".join(map(str, table.unreadable))
        notes.line(f"Skipped cut or damaged lines of {directory / METRICS}: {lines}")
    if options.out:
        notes.line(f"Wrote {count_of(len(table.rows), 'row')} to {options.out}")
    return 0
