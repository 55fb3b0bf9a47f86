"""New runs: from settings and a text, or from a model of another program."""

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind.checks import InputError, check_field, check_type
from smallmind.exchange.format import find_foreign
from smallmind.nn.position import position_class
from smallmind.runs import assembly
from smallmind.runs.budget import fit_recipe
from smallmind.runs.directory import RunDirectory, SavedConfig
from smallmind.runs.files import TEXT, Text, default_directory, is_literal, paths_of
from smallmind.runs.source import TOKENS, Source, read_source
from smallmind.settings.config import ModelConfig, RunConfig
from smallmind.settings.settings import Settings
from smallmind.settings.sources import with_recipe
from smallmind.text.dataset import Dataset

# Settings by which a text is read and becomes tokens.
OF_TEXT = (
    "text_field",
    "text_separator",
    "text_encoding",
    "tokenizer",
    "bpe_vocab_size",
    "bpe_split",
    "init_from",
)


def create(
    settings: Settings | None,
    text: Text,
    out: str | PathLike[str] | None,
    recipe: str | None,
    fields: dict[str, Any],
) -> tuple[RunDirectory, SavedConfig, dict[str, Source | Dataset]]:
    """Writes the run -> its directory, locked, its config, and its `source` and `data`.

    Arguments and errors as `Run.create`.
    """
    check_type("settings", settings, Settings, None)
    check_type("recipe", recipe, str, None)
    check_type("text", text, str, PathLike, list, tuple, None)
    check_type("out", out, str, PathLike, None)
    if settings and recipe:
        raise InputError(f"recipe={recipe!r} would change nothing: settings has every setting")
    if settings:
        settings = settings.replace(**fields)
    given = {name: fields[name] for name in OF_TEXT if name in fields}
    run_config = settings.run if settings else RunConfig(**given)
    initial = assembly.read_initial(run_config)
    literal = str(text) if is_literal(text) else None
    given_out = out or (settings.run.out if settings else fields.get("out"))
    if given_out:  # before a long text is read
        RunDirectory(Path(given_out)).check_free(literal)
    source = read_source(
        run_config.text if text is None else text,
        run_config,
        assembly.encoding_of(run_config, initial),
        cache=Path(given_out or default_directory("")).parent / TOKENS,
    )
    if settings is None and fields.get("minutes"):
        settings = Settings.from_fields(fit_recipe(fields, source.characters, recipe))
    elif settings is None:
        settings = Settings.from_fields(with_recipe(fields, recipe))
    if text is not None and literal is None:
        settings = settings.replace(text=tuple(map(str, paths_of(text))))
    settings, data, initial_sha256 = assembly.prepare(settings, source, initial)
    path = Path(out or settings.run.out or default_directory(source.name))
    if literal is not None:
        settings = settings.replace(text=str(path / TEXT))
    config = SavedConfig(
        assembly.absolute_paths(settings.replace(out=str(path))),
        source.sha256,
        initial_sha256=initial_sha256,
        awaits_timing=bool(settings.run.minutes),
    )
    directory = RunDirectory.create(path, literal)
    try:
        if data.tokenizer:
            directory.save_tokenizer(data.tokenizer)
        directory.save_config(config)
    except BaseException:
        directory.discard()
        raise
    return directory, config, {"source": source, "data": data}


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
    settings = Settings(model=foreign.config, run=RunConfig(tokenizer=tokenizer.kind))
    path = default_directory(source.stem) if out is None else Path(out)
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
    if position_class(config).limits_context:
        raise InputError(
            f"block_size={block_size}: the model has learned its {config.block_size} positions; "
            "leave it out"
        )
    if block_size > config.block_size:
        raise InputError(f"block_size={block_size} must be at most {config.block_size}")
    return dataclasses.replace(config, block_size=block_size)
