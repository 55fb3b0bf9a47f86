"""Encode texts once, into files of tokens to train on; run it again to resume."""

import argparse
import dataclasses
from pathlib import Path

from smallmind.checks import InputError, count_of
from smallmind.cli.console import Console
from smallmind.cli.flags import add_config_flags, add_text
from smallmind.console import activity
from smallmind.console.table import format_bytes
from smallmind.settings.config import SHARD_TOKENS, RunConfig
from smallmind.settings.presets import DEFAULT_RECIPE, RECIPES
from smallmind.settings.sources import OF_TOKENIZER, without_effect

SETTINGS = (
    "exclude",
    "include",
    "gitignore",
    "text_field",
    "text_encoding",
    "chat",
    "assistant",
    "chat_template",
    "tokenizer",
    *OF_TOKENIZER,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind prepare`."""
    add_text(parser, "+")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory to write to"
    )
    add_config_flags(parser, RunConfig, SETTINGS)
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=SHARD_TOKENS,
        metavar="N",
        help=f"tokens per file ({SHARD_TOKENS})",
    )


def run(options: argparse.Namespace) -> int:
    """Writes the tokens, and prints a summary -> exit status."""
    given = {name: x for name, x in vars(options).items() if name in SETTINGS}
    config = RunConfig(**given)
    for name in given:
        if reason := without_effect(name, vars(config)):
            raise InputError(reason)
    from smallmind.cli.describe import describe_reading, text_rows
    from smallmind.corpus.preparation import Encoding, begun_with, prepare
    from smallmind.corpus.tokens import TokensOnDisk
    from smallmind.runs.source import TokenSource, corpus_of

    console = Console()
    start = activity.clock()
    with activity.showing_on(console.activity):
        corpus = corpus_of(options.text, config)
        if "tokenizer" not in given:
            usual = RECIPES[DEFAULT_RECIPE].tokenizer_for(corpus.about_characters)
            config = dataclasses.replace(config, tokenizer=begun_with(options.out) or usual)
        try:
            shards = prepare(corpus, options.out, Encoding.of_run(config), options.shard_tokens)
        except KeyboardInterrupt:
            console.line("Interrupted; the same command resumes it")
            raise
        found = TokensOnDisk.of_shards(shards)
    seconds = activity.clock() - start
    assert found.report  # prepared texts have one
    nbytes = sum(file.path.stat().st_size for file in found.tokens.files)
    on_disk = ["on disk", f"{format_bytes(nbytes)} in {count_of(len(found.tokens.files), 'file')}"]
    rows = text_rows(TokenSource(found, str(options.out)), found.tokenizer, found)
    console.table("Text", [*rows, on_disk])
    describe_reading(console, found.report)
    if corpus.report is None:
        console.line(f"{options.out} was complete already")
    else:
        size = shards.index.state["nbytes"]
        speed = f", {size / seconds / 1e6:.0f} MB/s" if seconds > 1 else ""
        console.line(f"{format_bytes(size)} of text in {seconds:.1f} s{speed}")
    console.command("Next:", ["smallmind", "train", str(options.out)])
    return 0
