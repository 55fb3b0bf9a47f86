"""Check that a run would learn, before starting it. Writes nothing."""

import argparse

from smallmind.cli.console import Console
from smallmind.cli.flags import add_training_flags, choices_of_run
from smallmind.console import activity

INDENT = " " * 8  # of the second line of a check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind check`: those of train."""
    add_training_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Prints a line per check and the verdict -> exit status."""
    from smallmind.cli.describe import about_precision
    from smallmind.forecast.memory import why_not_repeated
    from smallmind.nn.backend import resolve_precision
    from smallmind.optim.schedule import too_short
    from smallmind.runs.creating import prepare
    from smallmind.training.preflight import preflight

    console = Console()
    failed = count = 0
    with activity.showing_on(console.activity):
        prepared = prepare(choices_of_run(options))
        config, is_untrained = prepared.settings.training, prepared.initial is None
        if not prepared.settings.run.minutes and (shortcoming := too_short(config)):
            console.warning(shortcoming)
        backend = prepared.settings.run.backend
        precision = resolve_precision(config.requested_precision, backend)
        if slower := about_precision(precision, backend):
            console.line(slower)
        training = prepared.training()
        if reason := why_not_repeated(training, config):
            console.line(f"Steps are not replayed from a recording: {reason}")
        with activity.doing("Checking", usual=True):
            for result in preflight(training, config, untrained=is_untrained):
                console.line(repr(result), INDENT)
                count, failed = count + 1, failed + (not result.passed)
    if failed:
        console.line(f"{failed} of {count} checks failed: this model would not learn properly")
        return 1
    console.line(f"All {count} checks passed: the run can start; nothing was written")
    return 0
