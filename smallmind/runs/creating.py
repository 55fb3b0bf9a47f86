"""New runs: from choices and a text, or from a model of another program.

A text is read and encoded first, as some settings follow from it.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from smallmind import parts
from smallmind.checks import InputError, check_field, check_type
from smallmind.corpus.preparation import Encoding
from smallmind.exchange.format import find_foreign
from smallmind.exchange.peft import find_peft
from smallmind.forecast import budget
from smallmind.forecast.threads import choose_threads
from smallmind.nn.freezing import frozen_parts
from smallmind.nn.network import declare_parameters
from smallmind.nn.position import position_class
from smallmind.nn.transformer import TransformerModel, resolve_precision, resolve_products
from smallmind.parallel import environment
from smallmind.parallel.environment import launched
from smallmind.runs.assembly import Initial, build_training, fit_tokenizer, new_characters
from smallmind.runs.chat_recipe import (
    LONGEST,
    chooses_evaluations,
    evaluated_often,
    for_built_in,
    for_conversations,
)
from smallmind.runs.directory import RunDirectory, SavedConfig
from smallmind.runs.files import RUNS, TEXT, Text, default_directory, is_literal, paths_of
from smallmind.runs.loading import find
from smallmind.runs.products import fastest_products
from smallmind.runs.source import (
    TOKENS,
    ConversationSource,
    Source,
    TokenSource,
    about_characters,
    about_tokens,
    read_source,
)
from smallmind.runs.trials import History
from smallmind.settings.config import OF_BLOCKS, ModelConfig, Precision, RunConfig, TrainingConfig
from smallmind.settings.presets import ARCHITECTURES, DEFAULT_RECIPE, PRESETS, RECIPES, SIZES
from smallmind.settings.settings import Settings, new_files
from smallmind.settings.sources import ALTERNATIVES, FIELDS, Choices, flag_of
from smallmind.text.dataset import HELD_OUT, Dataset
from smallmind.text.samplers import count_steps
from smallmind.text.templates import find_template
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.training import Training

# Names of several settings, by what sets them.
SETS: Mapping[str, Mapping[str, Any]] = {
    "size": SIZES,
    "arch": ARCHITECTURES,
    "preset": PRESETS,
}


class Prepared(NamedTuple):
    """A run that is ready to be built: everything in its settings is resolved."""

    settings: Settings
    source: Source
    tokenizer: Tokenizer
    data: Dataset
    initial: Initial | None
    limits_evaluations: bool = False  # to a share of the time of the run

    def training(self) -> Training:
        """Builds the training, to look at it: no file of the loss is written."""
        settings = self.settings.replace(**dict.fromkeys(new_files(self.settings.fields)))
        return build_training(settings, self.data, self.tokenizer, self.initial)


def choices_of(settings: Settings | None, recipe: str | None, fields: dict[str, Any]) -> Choices:
    """The choices of a program. Arguments and errors as `Run.create`."""
    check_type("settings", settings, Settings, None)
    check_type("recipe", recipe, str, None)
    names = {name: fields.pop(name) for name in SETS if fields.get(name) is not None}
    for name, value in (names | ({"recipe": recipe} if recipe else {})).items():
        if settings:
            raise InputError(f"{name}={value!r} would change nothing: settings has every setting")
    if settings:
        return Choices(settings.replace(**{"lengths": None, **fields}).fields, recipe=None)
    for name, value in names.items():
        if check_type(name, value, str) not in SETS[name]:
            raise InputError(f"{name}={value!r} must be one of {', '.join(SETS[name])}")
    if names:
        return Choices.of(flags=fields, recipe=recipe, **names)
    return Choices(fields, recipe or DEFAULT_RECIPE, is_default=recipe is None)


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
        begins_texts=True,
        packs_evenly=True,
        awaits_timing=bool(settings.run.minutes) or prepared.limits_evaluations,
        limits_evaluations=prepared.limits_evaluations,
        template_time=source.now.isoformat() if isinstance(source, ConversationSource) else None,
    )
    return *_write(path, config, prepared.tokenizer, literal), prepared


def _write(
    path: Path,
    config: SavedConfig,
    tokenizer: Tokenizer,
    text: str | None = None,
    model: TransformerModel | None = None,
    copied: Path | None = None,
) -> tuple[RunDirectory, SavedConfig]:
    directory = RunDirectory.create(path, text)
    try:
        directory.save_tokenizer(tokenizer)
        if model:
            directory.save_model(model, tokenizer, 0)
        if copied:
            directory.copy_model(copied)
        config = config._replace(sha256=directory.digests())
        directory.save_config(config)
    except BaseException:
        directory.discard()
        raise
    return directory, config


def prepare(choices: Choices, text: Text = None, cache: Path | None = None) -> Prepared:
    """Reads and encodes the text of a new run, and resolves its settings.

    `text` overrides that of the choices. One that is large for the memory is kept in `cache`, if it
    is given. InputError if a setting is wrong, or the text is too short or does not fit the weights
    that the run starts from.
    """
    if text is None:
        choices = for_built_in(choices)
    run = choices.settings().run  # before a long text is read
    text = run.text if text is None else text
    choices = _with_tokens(choices, about_characters(text, run))
    settings = choices.settings()
    run = settings.run
    if settings.training.adapter and not run.init_from:
        raise InputError(
            f"lora_rank={settings.training.lora_rank} adapts a model: name it with --init-from"
        )
    initial = Initial.read(run)
    if initial:
        choices = _as_trained(choices, initial)
        settings = choices.settings()
    encoding = Encoding.of_run(run, initial.tokenizer if initial else None)
    source = read_source(text, run, encoding, cache)
    tokenizer = fit_tokenizer(run, source, encoding, initial)
    if source.is_chat:
        choices = for_conversations(choices, source, tokenizer, initial)
        settings = choices.settings()
    elif _masks_documents(choices, source, tokenizer):
        choices = choices.having(mask_documents=True)
        settings = choices.settings()
    if budget.fits(choices):
        choices = _fitted(choices, source, tokenizer, cache)
        settings = choices.settings()
    if initial:
        # A model learns a longer context with conversations, unless they train an adapter alone.
        learns = source.is_chat and not settings.training.adapter
        settings = with_initial(settings, initial, LONGEST if learns else 0)
    settings = settings.replace(chat=source.is_chat)
    settings = with_tokenizer(settings, source)
    if initial and (added := tokenizer.vocab_size - initial.config.vocab_size) > 0:
        _check_grows(settings, initial, tokenizer, added)
        settings = settings.replace(vocab_size=tokenizer.vocab_size, bigram_vocab=initial.pairs)
    T = settings.model.block_size
    data = source.dataset(tokenizer, T, settings.run)
    settings = resolve_settings(settings, data, tokenizer)
    limits = source.is_chat and chooses_evaluations(choices)
    if limits:
        settings = evaluated_often(settings)
    return Prepared(settings, source, tokenizer, data, initial, limits)


def _fitted(choices: Choices, source: Source, tokenizer: Tokenizer, cache: Path | None) -> Choices:
    """The choices with the model for their minutes, after all that is known of the text."""
    tokens, vocab_size = about_tokens(source, tokenizer), tokenizer.vocab_size
    if source.is_chat:
        return budget.fit(choices, tokens, vocab_size)
    folders = [*([cache.parent] if cache else []), Path(RUNS)]
    history = history_of(choices, source, tokenizer, folders, int((1 - HELD_OUT) * tokens))
    outcomes = [*history.outcomes(), *history.runs()]
    timed = [] if launched() else history.timed()  # trials are made by one process
    return budget.fit(choices, tokens, vocab_size, outcomes, timed, environment.size() or 1)


def history_of(
    choices: Choices, source: Source, tokenizer: Tokenizer, folders: Sequence[Path], unique: int
) -> History:
    """The outcomes of a text that are known in folders of runs, for runs of these choices."""
    settings = with_tokenizer(choices.settings(), source)
    return History(folders, source.sha256, settings, tokenizer, unique, choices.given)


def outline(choices: Choices, characters: int) -> Settings:
    """The settings of a run with a text of this many characters, which is not read.

    What follows from the text is missing: vocab_size, document_token, and steps if epochs are set.
    """
    choices.settings()  # before anything computes
    choices = _with_tokens(choices, characters)
    choices = budget.fit(choices, budget.tokens_of(choices.fields, characters))
    settings = choices.settings()
    initial = Initial.read(settings.run)
    return with_initial(_as_trained(choices, initial).settings(), initial) if initial else settings


def _as_trained(choices: Choices, initial: Initial) -> Choices:
    """The choices with the dropout that a model was trained with, if nothing else was said.

    A model that has never seen any predicts far worse with it. And with its width, which the rates
    of recipes follow.
    """
    own = {"dropout": initial.config.dropout, "n_embd": initial.config.n_embd}
    return choices.having(**own | choices.given)


def _with_tokens(choices: Choices, characters: int | None) -> Choices:
    """The choices with the tokenizer of the recipe for so many characters, unless one was given."""
    given, recipe = choices.given, choices.recipe
    if recipe is None or "tokenizer" in given or given.get("init_from") or characters is None:
        return choices
    return choices.having(tokenizer=RECIPES[recipe].tokenizer_for(characters))


def _masks_documents(choices: Choices, source: Source, tokenizer: Tokenizer) -> bool:
    """True if the recipe keeps attention inside the documents of a text, and nothing else was said.

    It does where there are several, between which a learned tokenizer has a token of its own.
    """
    given, recipe, report = choices.given, choices.recipe, source.report
    if recipe is None or not RECIPES[recipe].masks_documents or given.get("init_from"):
        return False
    is_said = not given.keys().isdisjoint({"mask_documents", "text_separator"})
    has_token = tokenizer.is_learned and tokenizer.separator_token is not None
    return not is_said and has_token and report is not None and report.documents > 1


def with_initial(settings: Settings, initial: Initial, longest: int = 0) -> Settings:
    """The settings with the model and the kind of tokenizer that these weights need.

    Only dropout is a free choice, and without an embedding of positions a shorter context, or one
    that is at most the `longest`.
    InputError if another of their settings was chosen differently.
    """
    config, chosen = initial.config, settings.fields
    fixed = {**vars(config), "tokenizer": initial.tokenizer.kind}
    fixed["mask_documents"] = config.document_token is not None
    del fixed["dropout"], fixed["vocab_size"]
    if not position_class(config).limits_context and chosen["block_size"] != ModelConfig.block_size:
        fixed["block_size"] = min(chosen["block_size"], max(config.block_size, longest))
    for name, value in fixed.items():
        if chosen[name] not in (value, FIELDS[name][1].default):
            raise InputError(
                f"{name}={chosen[name]!r} contradicts {settings.run.init_from}, whose weights "
                f"have {name}={value!r}; leave it out"
            )
    # The vocabulary too, which the document_token is one of.
    return settings.replace(**fixed, vocab_size=config.vocab_size)


def _check_grows(settings: Settings, initial: Initial, tokenizer: Tokenizer, added: int) -> None:
    """InputError if a model is to learn new tokens, and the part that would is not trained."""
    training = settings.training
    frozen = frozen_parts(training.freeze, settings.model) & {"embedding", "head"}
    if not (training.adapter or frozen):
        return
    flag, why = "--freeze", "whose embedding or head is frozen"
    if training.adapter:
        flag, why = "--lora-rank", "which an adapter cannot teach it"
    if new := new_characters(initial.tokenizer, tokenizer):
        raise InputError(
            f"the text has {new} that {settings.run.init_from} does not know, {why}: remove them "
            f"from the text, or leave out {flag}"
        )
    raise InputError(
        f"the template of the conversations adds {added} tokens to the model, {why}: choose "
        f"--chat-template qa, or leave out {flag}"
    )


def with_tokenizer(settings: Settings, source: Source) -> Settings:
    """The settings with the tokenizer that given tokens have been encoded with.

    InputError if another setting of it was chosen.
    """
    if not (isinstance(source, TokenSource) and source.is_given):
        return settings
    tokenizer = source.tokenizer
    changes: dict[str, Any] = {"tokenizer": tokenizer.kind}
    if not source.is_chat and source.found.separator != tokenizer.separator:
        changes["text_separator"] = source.found.separator
    for name, field in tokenizer.settings.items():
        changes[field] = getattr(tokenizer, name)
        chosen, default = getattr(settings.run, field), getattr(RunConfig, field)
        if chosen not in (changes[field], default):
            raise InputError(
                f"{flag_of(field)} {chosen} contradicts {source.found.place}, whose vocabulary has "
                f"{changes[field]}; leave it out"
            )
    return settings.replace(**changes)


def resolve_settings(settings: Settings, data: Dataset, tokenizer: Tokenizer) -> Settings:
    """The settings with everything that follows from the text and the machine filled in.

    That is vocab_size, document_token, steps if epochs are set, min_lr, threads and the precision:
    AUTO would mean another one on another CPU. InputError if the machine has fewer threads, or
    documents are to be masked and no token separates them.
    """
    run, training = settings.run, settings.training
    changes: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "min_lr": training.resolved_min_lr,
    }
    if run.mask_documents and settings.model.document_token is None:
        changes["document_token"] = _document_token(run, tokenizer)
    if training.requested_precision == Precision.AUTO:
        changes["precision"] = resolve_precision(Precision.AUTO, run.backend).value
    if not (run.minutes and training.warmup_share):  # else the steps are not known yet
        counted = count_steps(training, data)
        changes |= {name: getattr(counted, name) for name in ("steps", *ALTERNATIVES["warmup"])}
    frozen_parts(training.freeze, settings.model)  # raises early
    declare_parameters(settings.model, training.adapter)  # likewise
    resolve_products(training.products, run.backend)  # likewise
    is_whole = training.freeze is None and training.adapter is None
    if training.requested_precision.has_blocks and is_whole:
        raise InputError(f"precision={training.requested_precision.value!r} is {OF_BLOCKS}")
    resolved = settings.replace(**changes)
    if launched():  # several processes choose their own, each on its machine
        return resolved
    adapts = run.adapt_threads and run.threads is None
    resolved = resolved.replace(threads=choose_threads(run, resolved), adapt_threads=adapts)
    return resolved if training.products else resolved.replace(products=fastest_products(resolved))


def _document_token(run: RunConfig, tokenizer: Tokenizer) -> int:
    """The token between documents. InputError if there is none."""
    token = tokenizer.separator_token
    if run.text_separator:
        token = tokenizer.token_of(run.text_separator)
    if token is None:
        raise InputError(
            f"mask_documents=True needs a token between documents, and {tokenizer!r} has none: "
            "leave it out, or choose --tokenizer bpe, which has <|endoftext|>"
        )
    return token


def with_paths(settings: Settings, text: Text, out: str | None) -> Settings:
    """The settings with this text and directory, and paths that are valid from any directory.

    `out` stays as given.
    """
    run = settings.run
    paths = {
        "init_from": run.init_from,
        "tokenizer": None if run.tokenizer in parts.TOKENIZERS else run.tokenizer,
    } | {name: getattr(loss, name) for loss in settings.losses.values() for name in loss.paths}
    absolute = {name: str(Path(path).resolve()) for name, path in paths.items() if path}
    texts = tuple(str(Path(path).resolve()) for path in paths_of(text))
    return settings.replace(**absolute, text=texts or None, out=out)


def import_model(
    source: str | PathLike[str],
    out: str | PathLike[str] | None,
    block_size: int | None,
    base: str | PathLike[str] | None = None,
) -> tuple[RunDirectory, SavedConfig]:
    """Writes the run -> its directory and its config. Arguments and errors as `Run.import_model`.

    It has no text: what needs one says so.
    """
    source = Path(check_type("source", source, str, PathLike))
    check_type("out", out, str, PathLike, None)
    if not source.exists():
        raise InputError(
            f"{source} does not exist; give a directory of transformers or a GGUF file. To fetch a "
            f"published model: pip install huggingface_hub, then {_fetching(source)}"
        )
    if find_peft(source):
        return _import_adapter(source, out, base)
    if base is not None:
        raise InputError(f"{source} is not an adapter of PEFT: leave out the base, {base}")
    foreign = find_foreign(source)
    if foreign is None:
        raise InputError(
            f"{source} is neither a directory of transformers, with a config.json that names a "
            "model_type, nor an adapter of PEFT, nor a GGUF file"
        )
    if block_size is not None:
        foreign.config = _shortened(foreign.config, block_size)
    tokenizer = foreign.tokenizer()
    _check_template(source, tokenizer)
    model = None if foreign.is_one_file else foreign.model("numpy")
    if model is None:  # the file is kept, with blocks of integers as they are
        for _ in foreign.parameters():
            pass  # checks them
    path = default_directory(source.stem) if out is None else Path(out)
    settings = Settings(foreign.config, run=RunConfig(tokenizer=tokenizer.kind, out=str(path)))
    config = SavedConfig(settings, text_sha256="", imported=str(source.resolve().name))
    copied = source if model is None else None
    directory, config = _write(path, config, tokenizer, model=model, copied=copied)
    directory.unlock()
    return directory, config


def _fetching(source: Path) -> str:
    """The commands that fetch and import a published model, which a person may have named."""
    is_name = not source.is_absolute() and len(source.parts) == 2 and not source.suffix
    name = source.as_posix() if is_name else "OWNER/NAME"
    place = name.partition("/")[2]
    return f"hf download {name} --local-dir {place} and smallmind import {place}"


def _check_template(source: Path, tokenizer: Tokenizer) -> None:
    """InputError if the model's chat template could not be used. Without jinja2 that is unknown."""
    if importlib.util.find_spec("jinja2") is None:
        return
    try:
        find_template(tokenizer)
    except InputError as error:
        place = (
            "the GGUF file" if source.is_file() else "chat_template.jinja or tokenizer_config.json"
        )
        raise InputError(
            f"{source}: {error}; remove the template from {place} to import the model without it"
        ) from None


def _import_adapter(
    source: Path, out: str | PathLike[str] | None, base: str | PathLike[str] | None
) -> tuple[RunDirectory, SavedConfig]:
    """Writes a run with an adapter of PEFT -> its directory and its config."""
    found = find(source)._replace(base=None if base is None else Path(base))
    saved, tokenizer = found.adapter(), found.tokenizer()
    assert saved.base
    path = default_directory(source.stem) if out is None else Path(out)
    run = RunConfig(tokenizer=tokenizer.kind, out=str(path), init_from=saved.base.path)
    settings = Settings(saved.config, TrainingConfig(**saved.adapter.settings), run=run)
    config = SavedConfig(settings, text_sha256="", imported=str(source.resolve().name))
    directory, config = _write(path, config, tokenizer, model=saved.model())
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
