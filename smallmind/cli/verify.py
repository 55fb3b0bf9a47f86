"""Check the checkpoints of a run, and retrain from each to the next. Writes nothing.

For the output of `smallmind prepare`, reads all files and compares them with their digests.
"""

import argparse
from typing import Any

from smallmind.cli.console import Console
from smallmind.cli.flags import add_run, run_of
from smallmind.console import activity

INDENT = " " * 8  # of the second line of a verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind verify`."""
    add_run(parser)
    parser.add_argument(
        "--digests-only", action="store_true", help="only check that each file is intact"
    )


def run(options: argparse.Namespace) -> int:
    """Prints a line per verdict -> exit status: 0 if all is well, 1 otherwise."""
    from smallmind.corpus.shards import holds_tokens, open_shards
    from smallmind.runs.run import Run
    from smallmind.runs.verification import Verdict
    from smallmind.training.records import StepRecord

    console = Console()

    def show(record: Any) -> None:
        if isinstance(record, StepRecord) and console.is_terminal:
            console.live(f"retrained: step {record.step}")
        if isinstance(record, Verdict):
            good = "identical" if record.name.startswith("retrained") else "intact"
            verdict = "FAILED" if record.fault else "ok    "
            console.line(f"{verdict}  {record.name}: {record.fault or good}", INDENT)

    directory = run_of(options)
    if holds_tokens(directory):
        shards = open_shards(directory)
        with activity.showing_on(console.activity):
            shards.verify()
        console.line(f"All {len(shards.train.files) + len(shards.held_out.files)} files are intact")
        return 0
    opened = Run.open(directory)
    if options.digests_only:
        verdicts = opened.verify(digests_only=True, on_record=show)
    else:
        with activity.showing_on(console.activity):
            verdicts = opened.verify(on_record=show)
    failed = sum(verdict.fault is not None for verdict in verdicts)
    if failed:
        console.line(f"{failed} of {len(verdicts)} checks failed")
        return 1
    console.line(f"All {len(verdicts)} checks passed")
    return 0
