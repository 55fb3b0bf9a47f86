"""Check that a run would learn, before starting it. Writes nothing."""

import argparse

from smallmind.cli.console import Console
from smallmind.cli.flags import add_training_flags, settings_of
from smallmind.cli.timing import without_new_cache
from smallmind.console import activity

INDENT = " " * 8  # of the second line of a check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind check`: those of train."""
    add_training_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Prints a line per check and the verdict -> exit status."""
    from smallmind.optim.schedule import too_short
    from smallmind.runs.assembly import (
        build_training,
        encoding_of,
        fit_tokenizer,
        make_dataset,
        read_initial,
        resolve_settings,
        with_initial,
        with_tokenizer,
    )
    from smallmind.runs.source import read_source
    from smallmind.training.preflight import preflight

    console = Console()
    failed = count = 0
    with activity.showing_on(console.activity):
        settings = without_new_cache(settings_of(options))
        initial = read_initial(settings.run)
        encoding = encoding_of(settings.run, initial)
        source = read_source(settings.run.text, settings.run, encoding)
        if initial:
            settings = with_initial(settings, initial)
        tokenizer = fit_tokenizer(settings, source, initial)
        settings = with_tokenizer(settings, source)
        data = make_dataset(settings, source, tokenizer)
        settings = resolve_settings(settings, data, tokenizer)
        if not settings.run.minutes and (shortcoming := too_short(settings.training)):
            console.warning(shortcoming)
        training = build_training(settings, data, tokenizer, initial)
        with activity.doing("Checking", usual=True):
            for result in preflight(training, settings.training, untrained=initial is None):
                console.line(repr(result), INDENT)
                count, failed = count + 1, failed + (not result.passed)
    if failed:
        console.line(f"{failed} of {count} checks failed: this model would not learn properly")
        return 1
    console.line(f"All {count} checks passed: the run can start; nothing was written")
    return 0
