"""A model of another program, made into a run."""

import dataclasses
from pathlib import Path

from smallmind.checks import InputError, check_field
from smallmind.exchange.format import find_foreign
from smallmind.runs.directory import RunDirectory, SavedConfig
from smallmind.runs.files import default_directory
from smallmind.settings.config import ModelConfig, RunConfig
from smallmind.settings.settings import Settings


def import_model(
    source: Path, out: Path | None, block_size: int | None
) -> tuple[RunDirectory, SavedConfig]:
    """Writes the run -> its directory and its config. Arguments and errors as `Run.import_model`.

    It has no text: what needs one says so.
    """
    if not source.exists():
        raise InputError(
            f"{source} does not exist; give a directory of transformers or a GGUF file"
        )
    foreign = find_foreign(source)
    if foreign is None:
        raise InputError(
            f"{source} is neither a directory of transformers, with a config.json that names a "
            "model_type, nor a GGUF file"
        )
    if block_size is not None:
        foreign.config = _shortened(foreign.config, block_size)
    model, tokenizer = foreign.load("numpy")
    settings = Settings(model=foreign.config, run=RunConfig(tokenizer=tokenizer.kind))
    path = out or default_directory(source.stem)
    config = SavedConfig(
        settings.replace(out=str(path)), text_sha256="", imported=str(source.resolve().name)
    )
    directory = RunDirectory.create(path)
    try:
        directory.save_tokenizer(tokenizer)
        directory.save_model(model, tokenizer, 0)
        directory.save_config(config)
    except BaseException:
        directory.discard()
        raise
    directory.unlock()
    return directory, config


def _shortened(config: ModelConfig, block_size: int) -> ModelConfig:
    """The config with a shorter context. InputError if its positions are learned, or fewer."""
    check_field(ModelConfig, "block_size", block_size)
    if config.position == "learned":
        raise InputError(
            f"block_size={block_size}: the model has learned its {config.block_size} positions; "
            "leave it out"
        )
    if block_size > config.block_size:
        raise InputError(f"block_size={block_size} must be at most {config.block_size}")
    return dataclasses.replace(config, block_size=block_size)
