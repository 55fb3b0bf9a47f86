"""Show how much memory and time a run would take, and what fits."""

import argparse
import re

from smallmind.checks import InputError
from smallmind.cli.console import Console
from smallmind.cli.flags import add_training_flags, choices_of, choices_of_run
from smallmind.console import activity
from smallmind.settings.sources import FIELDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind estimate`: those of train, and a memory budget.

    --vocab-size stands for a text with so many distinct tokens, unless they are learned from one.
    """
    add_training_flags(parser)
    group = parser.add_argument_group("Memory budget")
    group.add_argument(
        "--memory", type=parse_size, metavar="SIZE", help="such as 800MB; default: what is free"
    )
    group.add_argument(
        "--target-batch", type=int, default=64, metavar="N", help="windows per update (64)"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the parts of the memory, what fits and the time -> exit status: 0 it fits, 1 not."""
    from smallmind.cli.describe import model_for_minutes
    from smallmind.cli.memory import free_bytes, make_plan, show_estimate
    from smallmind.cli.timing import time_of_prepared
    from smallmind.forecast.memory import TextSize
    from smallmind.forecast.threads import choose_threads
    from smallmind.runs.assembly import outline_of
    from smallmind.runs.creating import outline, prepare
    from smallmind.runs.source import size_on_disk
    from smallmind.text.stories import MIN_CHARACTERS

    console = Console()
    choices, prepared, size = choices_of(options), None, None
    # Without tokens that are learned, --vocab-size is the number of tokens of some text.
    kind, tokens = choices.chosen.get("tokenizer"), None
    if kind not in FIELDS["bpe_vocab_size"][1].metadata["needs"]:
        tokens = vars(options).pop("bpe_vocab_size", None)
    choices = choices_of_run(options)
    if options.target_batch < 1:
        raise InputError(f"target_batch={options.target_batch} must be at least 1")
    run = choices.settings().run
    with activity.showing_on(console.activity):
        # Training keeps it on disk: its length is all that matters, and not exactly.
        if characters := size_on_disk(run.text, run):
            settings = outline(choices, characters)
            size = TextSize(0, characters, is_on_disk=True)
        elif tokens is not None and not run.text:
            settings = outline(choices, MIN_CHARACTERS)
        else:
            prepared = prepare(choices)
            settings = prepared.settings
            size = TextSize.of(prepared.source.nbytes, prepared.data)
    if tokens is not None:  # perhaps another number than that of the text
        token = 0 if settings.run.mask_documents else None  # any one takes the same memory
        settings, prepared = settings.replace(vocab_size=tokens, document_token=token), None
    settings = settings.replace(threads=choose_threads(settings.run, settings))
    loss = outline_of(settings, prepared.tokenizer if prepared else None)
    plan = make_plan(settings, loss, size)
    if settings.run.minutes:
        console.line(model_for_minutes(settings))
    status = show_estimate(console, plan, options.memory, options.target_batch)
    if prepared and plan.estimate.total <= free_bytes(plan):
        with activity.showing_on(console.activity):
            if time := time_of_prepared(prepared):
                console.line(f"Time on this machine: {time}.")
    return status


def parse_size(text: str) -> int:
    """800MB or 1.5GiB -> bytes. ArgumentTypeError if it is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?))?B", text.strip().upper())
    nbytes = 0
    if match:
        unit = (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")
        nbytes = int(float(match[1]) * unit)
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 800MB or 1.5GiB")
    return nbytes
