"""Write a trained model for transformers, for llama.cpp, or as a page that runs it."""

import argparse
import sys
from pathlib import Path

from smallmind import parts
from smallmind.cli.console import Console
from smallmind.cli.flags import MODEL_OR_RUN, add_checkpoint, add_run, run_of
from smallmind.console import activity
from smallmind.console.table import format_bytes

TYPES = parts.types_for("store")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind export`."""
    add_run(parser, MODEL_OR_RUN)
    formats = ", ".join([*parts.FORMATS, *parts.ADAPTER_FORMATS])
    parser.add_argument(
        "--to",
        nargs=2,
        required=True,
        metavar=("FORMAT", "PATH"),
        help=f"format ({formats}) and where to write it: hf DIR, new or empty; gguf FILE.gguf, "
        "replaced if it is a GGUF file; html FILE.html, a page with the model inside, for any "
        "browser; peft and gguf-adapter write only an adapter",
    )
    parser.add_argument(
        "--type",
        help=f"number type of the weights (f32): {_types()}",
    )
    add_checkpoint(parser)


def _types() -> str:
    """Says where each type can be used, and how many bits those of blocks take."""
    plain = ", ".join(kind.name for kind in TYPES if kind.block == 1)
    blocks = ", ".join(f"{kind.name} ({kind.bits} bits)" for kind in TYPES if kind.block > 1)
    page = ", ".join(kind.name for kind in TYPES if "page" in kind.uses)
    return f"{plain}, or in GGUF blocks of integers: {blocks} per weight; in HTML {page}"


def run(options: argparse.Namespace) -> int:
    """Writes the model, and prints how to use it."""
    from smallmind.exchange.architectures import architecture_of
    from smallmind.exchange.format import check_export
    from smallmind.exchange.stored import find
    from smallmind.runs.run import Run, export_stored
    from smallmind.text.templates import format_of

    console = Console()
    source, (to, target) = run_of(options), options.to
    path = Path(target)
    check_export(path, to, options.type)
    with activity.showing_on(Console(sys.stderr).activity):
        found = find(source, options.checkpoint, options.adapter)
        trained = options.adapter or source
        is_run = trained.is_dir() and not (found.is_external or to in parts.ADAPTER_FORMATS)
        run = Run.open(trained) if is_run else None
        config = export_stored(found, run, path, to, options.type, trained)
    files = [path] if path.is_file() else list(path.iterdir())
    size = format_bytes(sum(file.stat().st_size for file in files))
    # A page runs all parts that models here have.
    kind = "a page" if to == "html" else architecture_of(config).name
    shown = f"as {kind} to {path}: {size}"
    console.line(f"Wrote {found.found_at(trained)}, {shown}")
    if to == "gguf":
        plain = [] if format_of(found.tokenizer()) else ["-p", "...", "-no-cnv"]
        console.command("Next:", ["llama-cli", "-m", str(path), *plain])
    elif to == "html":
        console.line(f"Next: open {path} in a browser")
    elif to == "gguf-adapter":
        command = ["llama-cli", "-m", "BASE.gguf", "--lora", str(path), "-p", "...", "-no-cnv"]
        console.command("Next:", command)
    return 0
