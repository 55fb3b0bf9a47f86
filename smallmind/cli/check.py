"""Check that a run would learn, before starting it. Writes nothing."""

import argparse
import dataclasses

from smallmind import activity
from smallmind.cli.console import Console
from smallmind.cli.flags import add_training_flags, settings_of

INDENT = " " * 8  # of the second line of a check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind check`: those of train."""
    add_training_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Prints a line per check and the verdict -> exit status."""
    settings = settings_of(options)
    if settings.distillation.teacher:  # no cache is written for a run that is only checked
        distillation = dataclasses.replace(settings.distillation, teacher_cache=None)
        settings = dataclasses.replace(settings, distillation=distillation)

    from smallmind.runs.assembly import (
        build_training,
        make_dataset,
        read_source,
        resolve_settings,
    )
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.preflight import preflight

    console = Console()
    text = read_source(settings.run.text).text
    tokenizer = Tokenizer(text, settings.run.tokenizer)
    failed = count = 0
    with activity.showing_on(console.activity):
        data = make_dataset(settings, text, tokenizer)
        training = build_training(resolve_settings(settings, data, tokenizer), data, tokenizer)
        for result in preflight(training):
            verdict = "ok    " if result.passed else "FAILED"
            details = f"{result.measured}; expected {result.expected}"
            console.line(f"{verdict}  {result.name}: {details}", INDENT)
            count, failed = count + 1, failed + (not result.passed)
    if failed:
        console.line(f"{failed} of {count} checks failed: this model would not learn properly")
        return 1
    console.line(f"All {count} checks passed: the run can start; nothing was written")
    return 0
