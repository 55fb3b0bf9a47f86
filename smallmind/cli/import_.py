"""Make a run from a Hugging Face model folder, a GGUF file, or a PEFT adapter."""

import argparse
import sys
from pathlib import Path

from smallmind import parts
from smallmind.cli.console import Console, shorten
from smallmind.console import activity
from smallmind.settings.architectures import PUBLISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind import`."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="DIR|FILE",
        help="a Hugging Face model folder (config.json, tokenizer.json, .safetensors) or a .gguf "
        f"file, of {', '.join(known.name for known in PUBLISHED)}; or a PEFT adapter folder "
        "(adapter_config.json). `hf download OWNER/NAME --local-dir NAME` fetches a published "
        "model; it comes with the package huggingface_hub",
    )
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="directory of the run; default: runs/<date>-<name>"
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="MODEL",
        help="base model of a PEFT adapter; default: the one in its config, if that is a path",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="shorten the context to N tokens; not for models with learned positions",
    )


def run(options: argparse.Namespace) -> int:
    """Writes the run, and describes it."""
    from smallmind.exchange.architectures import architecture_of
    from smallmind.runs.run import Run

    console = Console()
    with activity.showing_on(Console(sys.stderr).activity):
        made = Run.import_model(options.source, options.out, options.block_size, options.base)
    config = made.settings.model
    unit = parts.load(parts.TOKENIZERS, made.settings.run.tokenizer).unit
    rows = [
        ["architecture", architecture_of(config).name],
        ["layers x channels", f"{config.n_layer} x {config.n_embd}"],
        ["context", f"{config.block_size:,} tokens"],
        ["vocabulary", f"{config.vocab_size:,} {unit}"],
    ]
    if adapter := made.settings.training.adapter:
        rows.append(["adapter", f"rank {adapter.rank}, on {', '.join(adapter.on)}"])
        rows.append(["base model", shorten(made.settings.run.init_from or "")])
    console.table("Imported adapter" if adapter else "Imported model", rows)
    console.line(f"The run is in {made.path}")
    console.command("Next:", ["smallmind", "generate", str(made.path)])
    console.command(
        "To fine-tune it:", ["smallmind", "train", "TEXT", "--init-from", str(made.path)]
    )
    return 0
