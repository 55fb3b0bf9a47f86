"""Write a page about a run: model and text, curves, samples, settings."""

import argparse
from pathlib import Path

from smallmind.checks import InputError
from smallmind.cli.console import Console
from smallmind.cli.flags import add_run, check_writable, run_of
from smallmind.files import durable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind report`."""
    add_run(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="file to write, for any browser; default: NAME.html in the working directory",
    )
    parser.epilog = (
        "The page is one file that needs no network: send it, print it or keep it. The run may "
        "still be training. train --sample-every and --profile put samples and a profile on it."
    )


def run(options: argparse.Namespace) -> int:
    """Writes the page. Only reads the run, which may still be training."""
    directory = run_of(options)
    out = options.out or Path(f"{directory.resolve().name}.html")
    if out.suffix not in (".html", ".htm"):
        raise InputError(f"--out: {out} must end in .html")
    check_writable("--out", out)
    from smallmind.views.report import report

    page = report(directory).encode("utf-8", "replace")
    durable.write(out, [page])
    Console().line(f"Wrote {len(page) / 1000:,.0f} KB to {out}")
    return 0
