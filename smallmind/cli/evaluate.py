"""Measure how well a trained model predicts a text."""

import argparse
import sys

from smallmind import activity
from smallmind.cli.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind evaluate`."""
    parser.add_argument(
        "--run", dest="directory", required=True, metavar="DIR", help="directory of the run"
    )
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="another text; default: the run's held-out part"
    )


def run(options: argparse.Namespace) -> int:
    """Prints a table of the loss and what follows from it."""
    from smallmind.cli.describe import shorten
    from smallmind.cli.display import floor_of_stories, format_perplexity
    from smallmind.runs.assembly import read_source
    from smallmind.runs.session import Run

    console = Console()
    opened = Run.open(options.directory)
    source = read_source(options.text) if options.text else None
    with activity.showing_on(Console(sys.stderr).activity):
        result = opened.evaluate(source.text if source else None)
    if source and not opened.is_own_text(source.text):
        part = f"{shorten(source.name)}, all of it (not the text of the run)"
    else:
        part = f"{shorten(opened.name)}, the held-out part"
    token = "char" if opened.settings.run.tokenizer == "char" else "token"
    rows = [
        ["text", part],
        ["tokens predicted", f"{result.tokens:,}"],
        ["loss", f"{result.loss:.4f} nats per token"],
        ["", f"{result.bits_per_character:.4f} bits/char"],
        ["perplexity", format_perplexity(result.perplexity)],
        [f"next {token} right", f"{result.accuracy:.1%}"],
    ]
    if opened.settings.run.text is None and (not source or opened.is_own_text(source.text)):
        floor, excess = floor_of_stories(result)
        rows.append(["entropy of the stories", f"{floor:.4f} nats per character"])
        rows.append(["above that floor", f"{excess:.4f} nats"])
    console.table("Evaluation", rows)
    return 0
