"""Generate text with a trained model."""

import argparse
import json
import os
import stat
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from smallmind.checks import InputError, count_of
from smallmind.cli.console import Console, typed_lines
from smallmind.cli.flags import (
    MODEL_OR_RUN,
    add_checkpoint,
    add_config_flags,
    add_form,
    add_precision,
    add_run,
    add_template_args,
    form_of,
    generation_of,
    run_of,
    unescaped,
)
from smallmind.console import activity
from smallmind.settings.config import GenerationConfig

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    import numpy as np

    from smallmind.exchange.stored import Loaded
    from smallmind.writing.form import Form
    from smallmind.writing.generation import Writer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind generate`."""
    add_run(parser, MODEL_OR_RUN)
    add_checkpoint(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; default: a new line")
    parser.add_argument(
        "--n",
        type=int,
        default=1,
        metavar="N",
        help="number of texts, with consecutive seeds from --seed (1)",
    )
    parser.add_argument(
        "-i",
        "--interactive",
        action="store_true",
        help="ask for prompts; Ctrl-C stops a text, Ctrl-D quits",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a line of JSON per text, with its exact characters",
    )
    parser.add_argument(
        "--template",
        default="",
        type=unescaped,
        metavar="TEXT",
        help='with -i: text around each prompt, which replaces {}, as in "Q: {}\\nA:"',
    )
    add_template_args(parser, "; the prompt is then a user turn, not a text to continue")
    add_precision(parser)
    add_form(parser)
    add_config_flags(parser, GenerationConfig)


def run(options: argparse.Namespace) -> int:
    """Prints the prompt and, piece by piece, its continuation."""
    config = generation_of(options)
    if options.n < 1:
        raise InputError(f"n={options.n} must be at least 1")
    if options.interactive and (options.json or options.n > 1 or options.prompt is not None):
        raise InputError("--interactive asks for prompts: leave out --prompt, --n and --json")
    if options.interactive and options.template_args is not None:
        raise InputError("--template-args needs --prompt; to talk, use smallmind chat")
    if options.template and not options.interactive:
        raise InputError("--template needs --interactive")
    if options.template and "{}" not in options.template:
        raise InputError("--template needs {} where the prompt goes, as in 'Q: {}\\nA:'")
    from smallmind.exchange.stored import find
    from smallmind.text.templates import asked, stopping, template_args, with_template_args
    from smallmind.writing.generation import Writer

    notes, path = Console(sys.stderr), run_of(options)
    with activity.showing_on(notes.activity):
        found = find(path, options.checkpoint, options.adapter)
        model, tokenizer = found.load(precision=options.precision)
        if options.interactive:
            notes.line(f"Using {found.found_at(path)}")
            form = form_of(options, tokenizer)
            return _converse((model, tokenizer), options.template, config, form, notes)
        prompt = tokenizer.opening if options.prompt is None else options.prompt
        begin: str | np.ndarray = prompt
        if options.template_args is not None:
            args = template_args(options.template_args)
            tokenizer = stopping(with_template_args(tokenizer, args))
            begin = asked(tokenizer, prompt)
        form = form_of(options, tokenizer)
        writer = Writer(model, tokenizer, begin, config, options.n, form)
        notes.line(f"Using {found.found_at(path)}")
        if options.json or options.n > 1:
            return _print_samples(writer, prompt, path, notes, options.json)
        _print_text(writer, prompt, notes)
    return 0


def _print_text(writer: "Writer", prompt: str, notes: Console) -> None:
    """Prints the prompt and the text as it is written, then the speed."""
    console = Console()
    with ExitStack() as progress:
        if console.is_terminal:
            progress.enter_context(activity.showing_on(console.activity))
        progress.enter_context(activity.doing("Generating", usual=True))
        pieces = (piece for (piece,) in writer.pieces() if piece)
        console.piece(prompt + next(pieces, ""))
        if not console.is_terminal and not _is_file_apart(console.stream, notes.stream):
            progress.close()  # a line about the text would get into it
        for piece in pieces:
            if not console.has_reader:
                break
            console.piece(piece)
    console.piece("\n")
    _show_speed(writer, notes)


def _show_speed(writer: "Writer", notes: Console) -> None:
    tokens = sum(writer.counts)
    if writer.seconds and tokens:
        notes.line(f"{count_of(tokens, 'token')}, {tokens / writer.seconds:,.0f} tokens/s")


def _print_samples(writer: "Writer", prompt: str, path: Path, notes: Console, as_json: bool) -> int:
    """Prints several texts, each under a line with its seed, or as a line of JSON each."""
    console = Console()
    with activity.doing("Generating", usual=True):
        samples = writer.samples()
    for sample in samples:
        if not as_json:
            console.line(f"Seed {sample.seed}:")
            console.piece(prompt + sample.text + "\n\n")
            continue
        more = {"seconds": round(writer.seconds, 4), "model": str(path)}
        console.piece(json.dumps({"prompt": prompt} | sample._asdict() | more) + "\n")
    if not as_json:
        _show_speed(writer, notes)
    return 0


def _converse(
    loaded: "Loaded",
    template: str,
    config: GenerationConfig,
    form: "Form | None",
    notes: Console,
) -> int:
    """Reads prompts until the end of the input, and continues each, in the template's place."""
    from smallmind.writing.generation import Writer

    for line in typed_lines(notes):
        prompt = template.replace("{}", line) if template else line
        try:
            _print_text(Writer(*loaded, prompt, config, 1, form), prompt, notes)
        except InputError as error:  # a character that the model does not know
            notes.line(f"smallmind: {error}")
        except KeyboardInterrupt:
            notes.line()
    return 0


def _is_file_apart(text: TextIO, notes: TextIO) -> bool:
    """Returns True if the text goes to a file and the notes go somewhere else."""
    try:
        file, other = os.fstat(text.fileno()), os.fstat(notes.fileno())
    except OSError:  # not a stream of the operating system
        return False
    return stat.S_ISREG(file.st_mode) and not os.path.samestat(file, other)
