"""Generate text with a trained model."""

import argparse
import os
import stat
import sys
from contextlib import ExitStack
from typing import TextIO

from smallmind import activity
from smallmind.cli.console import Console
from smallmind.cli.flags import (
    add_checkpoint,
    add_config_flags,
    add_run,
    generation_of,
    run_of,
)
from smallmind.config import GenerationConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind generate`."""
    add_run(parser, "directory of a run, or a model or checkpoint file")
    add_checkpoint(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; default: a new line")
    add_config_flags(parser, GenerationConfig)


def run(options: argparse.Namespace) -> int:
    """Prints the prompt and, piece by piece, the text that the model continues it with."""
    config = generation_of(options)
    from smallmind.generation import stream
    from smallmind.runs.loading import find

    console, notes = Console(), Console(sys.stderr)
    path = run_of(options)
    with activity.showing_on(notes.activity), ExitStack() as progress:
        found = find(path, options.checkpoint)
        model, tokenizer = found.load()
        prompt = tokenizer.opening if options.prompt is None else options.prompt
        tokenizer.encode(prompt)  # an unknown character is an error before anything is shown
        notes.line(f"Using {found.name}, of {path}")
        pieces = stream(model, tokenizer, prompt, config)
        if console.is_terminal:
            progress.enter_context(activity.showing_on(console.activity))
        progress.enter_context(activity.doing("Generating", usual=True))
        console.piece(prompt + next(pieces, ""))
        if not console.is_terminal and not _is_file_apart(console.stream, notes.stream):
            progress.close()  # a line about the text would get into it
        for piece in pieces:
            if not console.has_reader:
                break
            console.piece(piece)
    console.piece("\n")
    return 0


def _is_file_apart(text: TextIO, notes: TextIO) -> bool:
    """Whether the text goes to a file, and the notes somewhere else."""
    try:
        file, other = os.fstat(text.fileno()), os.fstat(notes.fileno())
    except OSError:  # not a stream of the operating system
        return False
    return stat.S_ISREG(file.st_mode) and not os.path.samestat(file, other)
