"""Show how much memory and time a run would take, and what fits."""

import argparse
import dataclasses
import re

from smallmind.checks import InputError
from smallmind.cli.console import Console
from smallmind.cli.flags import add_training_flags, given_of, settings_of
from smallmind.console import activity

DECIMAL_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
UNITS = DECIMAL_UNITS | BINARY_UNITS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind estimate`: those of train, and a memory budget.

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
    console = Console()
    is_learned = given_of(options).get("tokenizer") == "bpe"
    tokens = None if is_learned else vars(options).pop("bpe_vocab_size", None)
    with activity.showing_on(console.activity):
        settings = settings_of(options)
    if options.target_batch < 1:
        raise InputError(f"target_batch={options.target_batch} must be at least 1")
    from smallmind.cli.describe import model_for_minutes
    from smallmind.cli.memory import free_bytes, make_plan, show_estimate
    from smallmind.cli.timing import time_of_settings
    from smallmind.runs.assembly import (
        encoding_of,
        fit_tokenizer,
        make_dataset,
        read_initial,
        read_teacher,
        with_initial,
        with_tokenizer,
        with_vocabulary,
    )
    from smallmind.runs.source import approximate_characters, is_large, read_source
    from smallmind.runs.threads import choose_threads
    from smallmind.training.memory_estimate import TextSize

    initial = read_initial(settings.run)
    if initial:
        settings = with_initial(settings, initial)
    model, size, tokenizer, data = settings.model, None, None, None
    text = settings.run.text
    if is_large(text, settings.run):
        # Training keeps it on disk: its length is all that matters, and not exactly.
        size = TextSize(0, approximate_characters(text, settings.run), is_on_disk=True)
    elif text or tokens is None:
        source = read_source(text, settings.run, encoding_of(settings.run, initial))
        tokenizer = fit_tokenizer(settings, source, initial)
        settings = with_tokenizer(settings, source)
        data = make_dataset(settings, source, tokenizer)
        size = TextSize.of(source.nbytes, data)
    if tokens is not None:  # perhaps another number than that of the text
        token = 0 if settings.run.mask_documents else None  # any one takes the same memory
        model = dataclasses.replace(model, vocab_size=tokens, document_token=token)
        tokenizer = None
    elif tokenizer:
        model = with_vocabulary(settings, tokenizer)
    count = choose_threads(settings.run, dataclasses.replace(settings, model=model))
    config = dataclasses.replace(settings.run, threads=count)
    teacher = read_teacher(settings.distillation, tokenizer)
    plan = make_plan(model, settings.training, config, teacher, size)
    if settings.run.minutes:
        console.line(model_for_minutes(settings))
    status = show_estimate(console, plan, options.memory, options.target_batch)
    if data and tokenizer and plan.estimate.total <= free_bytes(plan):
        with activity.showing_on(console.activity):
            if time := time_of_settings(settings, data, tokenizer):
                console.line(f"Time on this machine: {time}.")
    return status


def parse_size(text: str) -> int:
    """800MB or 1.5GiB -> bytes. ArgumentTypeError if it is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?i?B)", text.strip(), re.IGNORECASE)
    nbytes = int(float(match[1]) * UNITS.get(match[2].upper(), 0)) if match else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 800MB or 1.5GiB")
    return nbytes
