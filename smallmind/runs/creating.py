"""New runs: from choices and a text, or from a model of another program.

A text is read and encoded first, as some settings follow from it.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from smallmind import parts
from smallmind.checks import InputError, check_field, check_type
from smallmind.corpus.preparation import Encoding
from smallmind.exchange.format import find_external
from smallmind.exchange.peft import find_peft
from smallmind.exchange.stored import find
from smallmind.forecast import budget
from smallmind.forecast.threads import choose_threads
from smallmind.losses.judge import Judge
from smallmind.losses.reward_settings import OF_REWARDS
from smallmind.nn.backend import resolve_precision, resolve_products
from smallmind.nn.freezing import frozen_parts
from smallmind.nn.network import declare_parameters
from smallmind.nn.position import position_class
from smallmind.parallel import environment
from smallmind.parallel.environment import launched
from smallmind.runs.assembly import Initial, build_training, fit_tokenizer, new_characters
from smallmind.runs.directory import RunDirectory, SavedConfig
from smallmind.runs.files import RUNS, TEXT, Text, default_directory, is_literal, paths_of
from smallmind.runs.loading import missing_from
from smallmind.runs.products import fastest_products
from smallmind.runs.source import (
    TOKENS,
    Source,
    about_characters,
    for_rewards,
    read_source,
    reading_for,
)
from smallmind.runs.trials import History
from smallmind.settings.config import OF_BLOCKS, ModelConfig, Precision, RunConfig, TrainingConfig
from smallmind.settings.presets import ARCHITECTURES, DEFAULT_RECIPE, PRESETS, SIZES, Fields
from smallmind.settings.rules import (
    Choices,
    Facts,
    Rule,
    evaluations_of_answers,
    resolve,
    with_defaults,
)
from smallmind.settings.settings import Origin, Settings, fields_of, new_files
from smallmind.settings.sources import flag_of
from smallmind.text import questions, stories
from smallmind.text.dataset import HELD_OUT, Dataset
from smallmind.text.samplers import Epochs
from smallmind.text.templates import find_template
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.training import Training

# Names of several settings, by what sets them.
SETS: Mapping[str, Mapping[str, Any]] = {"size": SIZES, "arch": ARCHITECTURES, "preset": PRESETS}


class Prepared(NamedTuple):
    """A run that is ready to be built: everything in its settings is resolved."""

    settings: Settings
    source: Source
    tokenizer: Tokenizer
    data: Dataset
    initial: Initial | None
    facts: Facts

    @property
    def limits_evaluations(self) -> bool:
        """True if they get a share of the time of the run: nobody has chosen them."""
        return self.settings.origins.get("val_every") == Rule(evaluations_of_answers).origin

    def training(self) -> Training:
        """Builds the training, to look at it: no file of the loss is written."""
        settings = self.settings.replace(**dict.fromkeys(new_files(self.settings.fields)))
        return build_training(settings, self.data, self.tokenizer, self.initial)


def choices_of(settings: Settings | None, recipe: str | None, fields: dict[str, Any]) -> Choices:
    """Returns the choices of a program. Arguments and errors as `Run.create`."""
    check_type("settings", settings, Settings, None)
    check_type("recipe", recipe, str, None)
    fields = {k: os.fspath(x) if isinstance(x, PathLike) else x for k, x in fields.items()}
    names = {name: fields.pop(name) for name in SETS if fields.get(name) is not None}
    for name, value in (names | ({"recipe": recipe} if recipe else {})).items():
        if settings:
            raise InputError(f"{name}={value!r} has no effect: settings already has every setting")
    if settings:
        return Choices(settings.replace(**({"lengths": None} | fields)).fields, recipe=None)
    for name, value in names.items():
        if check_type(name, value, str) not in SETS[name]:
            raise InputError(f"{name}={value!r} must be one of {', '.join(SETS[name])}")
    if names:
        return Choices.of(flags=fields, recipe=recipe, **names)
    return Choices(fields, recipe or DEFAULT_RECIPE, is_default=recipe is None)


def create(
    choices: Choices, text: Text, out: str | PathLike[str] | None
) -> tuple[RunDirectory, SavedConfig, Prepared]:
    """Writes the run -> its directory, locked, its config, what it is made of. As `Run.create`."""
    check_type("text", text, str, PathLike, list, tuple, None)
    check_type("out", out, str, PathLike, None)
    literal = str(text) if is_literal(text) else None
    out = out or choices.chosen.get("out")
    if out:  # before a long text is read
        RunDirectory(Path(out)).check_free(literal)
    prepared = prepare(choices, text, Path(out or default_directory("")).parent / TOKENS)
    settings, source = prepared.settings, prepared.source
    path = Path(out or default_directory(source.name))
    text = settings.run.text if text is None else text
    config = SavedConfig(
        with_paths(settings, path / TEXT if literal else text, str(path)),
        source.sha256,
        initial_sha256=prepared.initial.sha256 if prepared.initial else None,
        begins_texts=True,
        packs_evenly=True,
        awaits_timing=bool(settings.run.minutes) or prepared.limits_evaluations,
        limits_evaluations=prepared.limits_evaluations,
        template_time=source.now.isoformat() if source.now else None,
    )
    return *_write(path, config, prepared.tokenizer, literal), prepared


def _write(
    path: Path,
    config: SavedConfig,
    tokenizer: Tokenizer,
    text: str | None = None,
    save_model: Callable[[RunDirectory], object] = lambda _: None,
) -> tuple[RunDirectory, SavedConfig]:
    directory = RunDirectory(path)
    try:
        directory.create(text)
        directory.save_tokenizer(tokenizer)
        save_model(directory)
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
    chosen = choices.settings()  # before a long text is read
    text = chosen.run.text if text is None else text
    characters = about_characters(text, chosen.run)
    if chosen.training.adapter and not chosen.run.init_from:
        raise InputError(
            f"lora_rank={chosen.training.lora_rank} adapts a model: give one with --init-from"
        )
    kind, config = chosen.loss
    if kind != OF_REWARDS and chosen.rewards.reward:
        raise InputError(
            f"{flag_of(config.chosen_by)} and --reward both set the loss; give only one"
        )
    if kind in ("preferences", OF_REWARDS) and not chosen.run.init_from:
        name = config.chosen_by
        raise InputError(
            f"{name}={getattr(config, name)} needs a model to start from: give one with --init-from"
        )
    if kind == OF_REWARDS:
        Judge(config.reward, config.reward_seconds)  # InputError before anything is read
    initial = Initial.read(chosen.run)
    known: dict[str, Any] = {"characters": characters, **(initial.facts if initial else {})}
    if text is None:
        known["is_chat"] = bool(chosen.run.chat)
    if text is None and not initial:
        known["built_in"] = (questions if known["is_chat"] else stories).BUILT_IN_FIELDS
    run = RunConfig(**fields_of(RunConfig, resolve(choices, Facts(**known)).chosen))
    encoding = Encoding.of_run(run, initial.tokenizer if initial else None)
    source = read_source(text, run, encoding, cache, reading_for(chosen))
    source = for_rewards(source, chosen.rewards)
    tokenizer = fit_tokenizer(run, source, encoding, initial)
    if initial:
        _check_grows(chosen, initial, tokenizer)

    # The rule for epochs asks for it before the run does: it is made once.
    @functools.lru_cache(maxsize=1)
    def dataset(T: int, run: RunConfig) -> Dataset:
        return source.dataset(tokenizer, T, run)

    def dataset_for(fields: Fields) -> Dataset:
        now = with_defaults(fields)
        names = ("batch_size", "seed", "learn", "chat")
        return dataset(now["block_size"], RunConfig(**{name: now[name] for name in names}))

    def steps_per_epoch(fields: Fields) -> int:
        return Epochs(dataset_for(fields), with_defaults(fields)["grad_accum_steps"]).steps

    known |= _facts_of_text(run, source, tokenizer)
    if chosen.run.minutes:
        known["forecast"] = functools.partial(_forecast, source, tokenizer, cache)
    facts = Facts(**known, steps_per_epoch=steps_per_epoch)
    settings = settle(choices, facts)
    data = dataset_for(settings.fields)
    return Prepared(settings, source, tokenizer, data, initial, facts)


def _facts_of_text(run: RunConfig, source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the facts of a text that has been read and encoded, by name."""
    report, separator = source.report, tokenizer.separator_token
    several = report is not None and report.documents > 1
    known = {
        **source.facts,
        **source.about_conversations(tokenizer),
        "is_chat": source.is_chat,
        "has_documents": several and tokenizer.is_learned and separator is not None,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": repr(tokenizer),
        "separator": separator,
        "precision": resolve_precision(Precision.AUTO, run.backend).value,
    }
    between = known.get("of_tokens", {}).get("text_separator", run.text_separator)
    if between and run.mask_documents:
        known["separator"] = tokenizer.token_of(between)
    return known


def _forecast(source: Source, tokenizer: Tokenizer, cache: Path | None, choices: Choices) -> Fields:
    """Chooses the model for the minutes, after all that is known of the text -> its fields."""
    tokens, vocab_size = source.about_tokens(tokenizer), tokenizer.vocab_size
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
    """Finds the outcomes of a text in folders of runs, for runs of these choices."""
    settings = choices.settings(Facts(**source.facts))
    return History(folders, source.sha256, settings, tokenizer, unique, choices.chosen)


def outline(choices: Choices, characters: int) -> Settings:
    """Settles what it can of a run with a text of this many characters, which is not read.

    What follows from the text is missing: vocab_size, document_token, and steps if epochs are set.
    """
    initial = Initial.read(choices.settings().run)

    def forecast(choices: Choices) -> Fields:
        return budget.fit(choices, budget.tokens_of(resolve(choices).chosen, characters))

    known = initial.facts if initial else {}
    return choices.settings(Facts(characters=characters, forecast=forecast, **known))


def _check_grows(settings: Settings, initial: Initial, tokenizer: Tokenizer) -> None:
    """Raises InputError if a model is to learn new tokens with a part that is not trained."""
    training, added = settings.training, tokenizer.vocab_size - initial.config.vocab_size
    frozen = frozen_parts(training.freeze, initial.config) & {"embedding", "head"}
    if added <= 0 or not (training.adapter or frozen):
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


BY_MACHINE = Origin("this machine", "As many threads as cores and the size of a pass allow.")


def settle(choices: Choices, facts: Facts) -> Settings:
    """Settles what follows from the facts and the machine. InputError if settings contradict."""
    settings = choices.settings(facts)
    run, training = settings.run, settings.training
    frozen_parts(training.freeze, settings.model)  # raises early
    declare_parameters(settings.model, training.adapter)  # likewise
    resolve_products(training.products, run.backend)  # likewise
    is_whole = training.freeze is None and training.adapter is None
    if training.requested_precision.has_blocks and is_whole:
        raise InputError(f"precision={training.requested_precision.value!r} is {OF_BLOCKS}")
    if launched():  # several processes choose their own, each on its machine
        return settings
    fields = {
        "threads": choose_threads(run, settings),
        "adapt_threads": run.adapt_threads and run.threads is None,
    }
    changed = {name: value for name, value in fields.items() if getattr(run, name) != value}
    settings = settings.replace(BY_MACHINE, **changed)
    if training.products:
        return settings
    return settings.replace(BY_MACHINE, products=fastest_products(settings))


def with_paths(settings: Settings, text: Text, out: str | None) -> Settings:
    """-> the settings with this text and directory, and absolute paths; `out` stays as it is."""
    run = settings.run
    paths = {
        "init_from": run.init_from,
        "tokenizer": None if run.tokenizer in parts.TOKENIZERS else run.tokenizer,
    } | {name: getattr(loss, name) for loss in settings.losses.values() for name in loss.paths}
    named = {name: path for name, path in paths.items() if path and path not in parts.REWARDS}
    absolute = {name: str(Path(path).resolve()) for name, path in named.items()}
    texts = tuple(str(Path(path).resolve()) for path in paths_of(text))
    changed = settings.replace(**absolute, text=texts or None, out=out)
    return dataclasses.replace(changed, origins=settings.origins)


def import_model(
    source: str | PathLike[str],
    out: str | PathLike[str] | None,
    block_size: int | None,
    base: str | PathLike[str] | None = None,
) -> tuple[RunDirectory, SavedConfig]:
    """Writes a run without a text -> its directory and its config. As `Run.import_model`."""
    source = Path(check_type("source", source, str, PathLike))
    check_type("out", out, str, PathLike, None)
    if not source.exists():
        raise InputError(
            f"{source} not found; give a Hugging Face model folder or a .gguf file. To fetch a "
            f"published model: pip install huggingface_hub, then {_fetching(source)}"
        )
    path = default_directory(source.stem) if out is None else Path(out)
    if find_peft(source):
        adapted = find(source) if base is None else find(base, adapter=source)
        saved, tokenizer = adapted.adapter(), adapted.tokenizer()
        assert saved.base
        run = RunConfig(tokenizer=tokenizer.kind, out=str(path), init_from=saved.base.path)
        settings = Settings(saved.config, TrainingConfig(**saved.adapter.settings), run)
        model = saved.model()
        return _write_imported(
            path, settings, tokenizer, source, lambda run: run.save_model(model, tokenizer, 0)
        )
    if base is not None:
        raise InputError(f"{source} is not a PEFT adapter: leave out the base, {base}")
    found = find_external(source)
    if found is None:
        raise InputError(
            missing_from(source)
            or f"{source} is neither a Hugging Face model folder (a config.json with a "
            "model_type), nor a PEFT adapter, nor a GGUF file"
        )
    if block_size is not None:
        found.config = _shortened(found.config, block_size)
    tokenizer = found.tokenizer()
    _check_template(source, tokenizer)
    settings = Settings(found.config, run=RunConfig(tokenizer=tokenizer.kind, out=str(path)))
    return _write_imported(
        path, settings, tokenizer, source, lambda run: run.import_model(found, tokenizer)
    )


def _write_imported(
    path: Path,
    settings: Settings,
    tokenizer: Tokenizer,
    source: Path,
    save_model: Callable[[RunDirectory], object],
) -> tuple[RunDirectory, SavedConfig]:
    """Writes a run with a model -> its directory and its config."""
    config = SavedConfig(settings, text_sha256="", imported=str(source.resolve().name))
    directory, config = _write(path, config, tokenizer, save_model=save_model)
    directory.unlock()
    return directory, config


def _fetching(source: Path) -> str:
    """-> the commands that fetch and import a published model, which a person may have named."""
    is_name = not source.is_absolute() and len(source.parts) == 2 and not source.suffix
    name = source.as_posix() if is_name else "OWNER/NAME"
    folder = name.partition("/")[2]
    return f"hf download {name} --local-dir {folder} and smallmind import {folder}"


def _check_template(source: Path, tokenizer: Tokenizer) -> None:
    """Raises InputError if the chat template cannot be used; unknown without jinja2."""
    if importlib.util.find_spec("jinja2") is None:
        return
    try:
        find_template(tokenizer)
    except InputError as error:
        files = "chat_template.jinja or tokenizer_config.json"
        raise InputError(
            f"{source}: {error}; remove the template from "
            f"{'the GGUF file' if source.is_file() else files} to import the model without it"
        ) from None


def _shortened(config: ModelConfig, block_size: int) -> ModelConfig:
    """-> the config with a shorter context. InputError if its positions are learned, or fewer."""
    check_field(ModelConfig, "block_size", block_size)
    if position_class(config).limits_context:
        raise InputError(
            f"block_size={block_size}: the model has {config.block_size} learned positions; leave "
            "it out"
        )
    if block_size > config.block_size:
        raise InputError(f"block_size={block_size} must be at most {config.block_size}")
    return dataclasses.replace(config, block_size=block_size)
