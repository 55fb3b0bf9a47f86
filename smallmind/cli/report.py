"""Write a page about a run, or several: sample, losses, how to use it, curves, settings."""

import argparse
from pathlib import Path

from smallmind.checks import InputError
from smallmind.cli.console import Console
from smallmind.cli.flags import add_runs, check_writable, find_run, runs_of
from smallmind.files import durable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind report`."""
    add_runs(parser)
    # Earlier versions named the run by this flag.
    parser.add_argument("--run", dest="run_flag", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="file to write, for any browser; default: NAME-report.html in the working directory",
    )
    parser.epilog = (
        "The page is one file that works offline: send it, print it or keep it. The run may "
        "still be training. train --sample-every and --profile add samples and a profile. "
        "Several runs, or the folder of a sweep, are compared: curves, settings that differ, "
        "mean and spread over seeds."
    )


def run(options: argparse.Namespace) -> int:
    """Writes the page. Only reads the run, which may still be training."""
    from smallmind.exchange.html import is_page

    options.run_names += [options.run_flag] if options.run_flag else []
    directories = runs_of(options)
    # The folder of a sweep names the page, not its first run.
    named = find_run(options.run_names[0]) if options.run_names else directories[0]
    out = options.out or Path(f"{named.resolve().name}-report.html")
    if out.suffix not in (".html", ".htm"):
        raise InputError(f"--out: {out} must end in .html")
    check_writable("--out", out)
    if is_page(out):
        raise InputError(f"--out: {out} is a page with a model inside; choose another name")
    from smallmind.views.report import report
    from smallmind.views.report_of_runs import report_of_runs

    is_one = len(directories) == 1
    content = report(directories[0]) if is_one else report_of_runs(directories)
    page = content.encode("utf-8", "replace")
    durable.write(out, [page])
    Console().line(f"Wrote {len(page) / 1000:,.0f} KB to {out}")
    return 0
