"""Generate text with a trained model."""

import argparse
import sys

from smallmind import activity
from smallmind.cli.console import Console
from smallmind.cli.flags import add_config_flags, generation_of
from smallmind.config import GenerationConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind generate`."""
    parser.add_argument(
        "--run",
        dest="source",
        required=True,
        metavar="DIR",
        help="directory of the run, or a model or checkpoint file",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; default: a new line")
    add_config_flags(parser, GenerationConfig)


def run(options: argparse.Namespace) -> int:
    """Prints the prompt and, piece by piece, the text that the model continues it with."""
    config = generation_of(options)
    from smallmind.generation import stream
    from smallmind.runs.loading import load

    console = Console()
    with activity.showing_on(Console(sys.stderr).activity):
        model, tokenizer = load(options.source)
        prompt = tokenizer.opening if options.prompt is None else options.prompt
        pieces = stream(model, tokenizer, prompt, config)
        console.piece(prompt)
        for piece in pieces:
            if not console.has_reader:
                break
            console.piece(piece)
    console.piece("\n")
    return 0
