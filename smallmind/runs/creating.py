"""New runs: from settings and a text, or from a model of another program."""

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind.checks import InputError, check_field, check_type
from smallmind.exchange.format import find_foreign
from smallmind.nn.position import position_class
from smallmind.runs.assembly import Prepared, prepare, with_paths
from smallmind.runs.directory import RunDirectory, SavedConfig
from smallmind.runs.files import TEXT, Text, default_directory, is_literal
from smallmind.runs.source import TOKENS
from smallmind.settings.config import ModelConfig, RunConfig
from smallmind.settings.presets import DEFAULT_RECIPE
from smallmind.settings.settings import Settings
from smallmind.settings.sources import Choices


def choices_of(settings: Settings | None, recipe: str | None, fields: dict[str, Any]) -> Choices:
    """The choices of a program. Arguments and errors as `Run.create`."""
    check_type("settings", settings, Settings, None)
    check_type("recipe", recipe, str, None)
    if settings and recipe:
        raise InputError(f"recipe={recipe!r} would change nothing: settings has every setting")
    if settings:
        return Choices(settings.replace(**fields).fields, recipe=None)
    return Choices(fields, recipe or DEFAULT_RECIPE)


def create(
    choices: Choices, text: Text, out: str | PathLike[str] | None
) -> tuple[RunDirectory, SavedConfig, Prepared]:
    """Writes the run -> its directory, locked, its config, and what it was prepared from.

    Arguments and errors as `Run.create`.
    """
    check_type("text", text, str, PathLike, list, tuple, None)
    check_type("out", out, str, PathLike, None)
    literal = str(text) if is_literal(text) else None
    out = out or choices.given.get("out")
    if out:  # before a long text is read
        RunDirectory(Path(out)).check_free(literal)
    prepared = prepare(choices, text, Path(out or default_directory("")).parent / TOKENS)
    settings, source = prepared.settings, prepared.source
    path = Path(out or default_directory(source.name))
    given = settings.run.text if text is None else text
    config = SavedConfig(
        with_paths(settings, path / TEXT if literal else given, str(path)),
        source.sha256,
        initial_sha256=prepared.initial.sha256 if prepared.initial else None,
        awaits_timing=bool(settings.run.minutes),
    )
    directory = RunDirectory.create(path, literal)
    try:
        directory.save_tokenizer(prepared.tokenizer)
        directory.save_config(config)
    except BaseException:
        directory.discard()
        raise
    return directory, config, prepared


def import_model(
    source: str | PathLike[str], out: str | PathLike[str] | None, block_size: int | None
) -> tuple[RunDirectory, SavedConfig]:
    """Writes the run -> its directory and its config. Arguments and errors as `Run.import_model`.

    It has no text: what needs one says so.
    """
    source = Path(check_type("source", source, str, PathLike))
    check_type("out", out, str, PathLike, None)
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
    path = default_directory(source.stem) if out is None else Path(out)
    settings = Settings(foreign.config, run=RunConfig(tokenizer=tokenizer.kind, out=str(path)))
    config = SavedConfig(settings, text_sha256="", imported=str(source.resolve().name))
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
    if position_class(config).limits_context:
        raise InputError(
            f"block_size={block_size}: the model has learned its {config.block_size} positions; "
            "leave it out"
        )
    if block_size > config.block_size:
        raise InputError(f"block_size={block_size} must be at most {config.block_size}")
    return dataclasses.replace(config, block_size=block_size)
