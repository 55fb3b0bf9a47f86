"""From choices to a run that is ready to be built: text, tokenizer, resolved settings, weights."""

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from smallmind import parts
from smallmind.checks import InputError
from smallmind.corpus.preparation import Encoding
from smallmind.files import safetensors
from smallmind.nn.freezing import frozen_parts
from smallmind.nn.position import position_class
from smallmind.nn.transformer import TransformerModel, resolve_precision
from smallmind.parallel.environment import launched
from smallmind.parallel.group import ALONE, Group
from smallmind.runs import budget
from smallmind.runs.files import MODEL, Text, paths_of
from smallmind.runs.loading import find, load_model, read_tokenizer
from smallmind.runs.source import Source, TextSource, TokenSource, read_source
from smallmind.runs.threads import choose_threads, use_threads
from smallmind.settings.config import DistillationConfig, ModelConfig, Precision, RunConfig
from smallmind.settings.settings import Settings, from_saved
from smallmind.settings.sources import FIELDS, Choices, flag_of
from smallmind.text.dataset import HELD_OUT, Dataset
from smallmind.text.samplers import Epochs
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.distillation import Distillation
from smallmind.training.memory_estimate import Teacher
from smallmind.training.training import Training


class Initial(NamedTuple):
    """The model that a run starts from, with its tokenizer."""

    model: TransformerModel
    tokenizer: Tokenizer

    @classmethod
    def read(cls, run: RunConfig, sha256: str | None = None) -> "Initial | None":
        """The weights that init_from names; None if it is not set.

        InputError if a run was created with others, which had this digest.
        """
        if run.init_from is None:
            return None
        model, tokenizer = find(run.init_from).load("numpy")
        initial = cls(model, tokenizer)
        if sha256 and initial.sha256 != sha256:
            raise InputError(
                f"{run.init_from} has changed since the run was created; start a new run"
            )
        return initial

    @property
    def config(self) -> ModelConfig:
        """The config of the model."""
        return self.model.config

    @property
    def sha256(self) -> str:
        """SHA-256 of the weights."""
        return hashlib.sha256(self.model.flat.data.tobytes()).hexdigest()


class Prepared(NamedTuple):
    """A run that is ready to be built: everything in its settings is resolved."""

    settings: Settings
    source: Source
    tokenizer: Tokenizer
    data: Dataset
    initial: Initial | None

    def training(self) -> Training:
        """Builds the training, to look at it: no teacher cache is written."""
        settings, cache = self.settings, self.settings.distillation.teacher_cache
        if cache and not os.path.lexists(cache):
            settings = settings.replace(teacher_cache=None)
        return build_training(settings, self.data, self.tokenizer, self.initial)


def prepare(choices: Choices, text: Text = None, cache: Path | None = None) -> Prepared:
    """Reads and encodes the text of a new run, and resolves its settings.

    `text` overrides that of the choices. One that is large for the memory is kept in `cache`, if it
    is given. InputError if a setting is wrong, or the text is too short or does not fit the weights
    that the run starts from.
    """
    settings = choices.settings()  # before a long text is read
    run = settings.run
    initial = Initial.read(run)
    encoding = Encoding.of_run(run, initial.tokenizer if initial else None)
    source = read_source(run.text if text is None else text, run, encoding, cache)
    settings = _fitted(choices, settings, source.characters, initial)
    tokenizer = fit_tokenizer(run, source, encoding, initial)
    settings = with_tokenizer(settings, source)
    data = make_dataset(settings, source, tokenizer)
    settings = resolve_settings(settings, data, tokenizer)
    return Prepared(settings, source, tokenizer, data, initial)


def outline(choices: Choices, characters: int) -> Settings:
    """The settings of a run with a text of this many characters, which is not read.

    What follows from the text is missing: vocab_size, document_token, and steps if epochs are set.
    """
    settings = choices.settings()
    return _fitted(choices, settings, characters, Initial.read(settings.run))


def _fitted(
    choices: Choices, settings: Settings, characters: int, initial: Initial | None
) -> Settings:
    """The settings that fit the time or the initial weights, if any were chosen."""
    if settings.run.minutes and (fitted := budget.fit(choices, characters)) is not choices:
        settings = fitted.settings()
    return with_initial(settings, initial) if initial else settings


def make_dataset(settings: Settings, source: Source, tokenizer: Tokenizer) -> Dataset:
    """The dataset that settings describe. InputError if the text is too short."""
    run = settings.run
    return source.dataset(tokenizer, settings.model.block_size, run.batch_size, run.seed)


def with_initial(settings: Settings, initial: Initial) -> Settings:
    """The settings with the model and the kind of tokenizer that these weights need.

    Only dropout is a free choice, and without an embedding of positions a shorter context.
    InputError if another of their settings was chosen differently.
    """
    config, chosen = initial.config, settings.fields
    fixed = {**vars(config), "tokenizer": initial.tokenizer.kind}
    fixed["mask_documents"] = config.document_token is not None
    del fixed["dropout"], fixed["vocab_size"]
    if not position_class(config).limits_context and chosen["block_size"] != ModelConfig.block_size:
        fixed["block_size"] = min(chosen["block_size"], config.block_size)
    for name, value in fixed.items():
        if chosen[name] not in (value, FIELDS[name][1].default):
            raise InputError(
                f"{name}={chosen[name]!r} contradicts {settings.run.init_from}, whose weights "
                f"have {name}={value!r}; leave it out"
            )
    # The vocabulary too, which the document_token is one of.
    return settings.replace(**fixed, vocab_size=config.vocab_size)


def fit_tokenizer(
    run: RunConfig, source: Source, encoding: Encoding, initial: Initial | None = None
) -> Tokenizer:
    """The tokenizer of a new run: that of its tokens or initial weights, or made from the text.

    InputError if the tokenizer of the weights does not know all characters of the text.
    """
    if source.tokenizer and initial and source.tokenizer.digest == initial.tokenizer.digest:
        return initial.tokenizer  # with what has been published of it
    if source.tokenizer:
        return source.tokenizer
    assert isinstance(source, TextSource)
    text, tokenizer = source.text, encoding.tokenizer
    if isinstance(tokenizer, str):
        if encoding.kind.is_learned:
            text = text[: len(text) - (source.held_out or int(len(text) * HELD_OUT))]
        return Tokenizer(text, tokenizer, **encoding.settings)
    if initial and (unknown := tokenizer.unknown(text)):
        shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        raise InputError(
            f"the text has characters that {run.init_from} does not know ({len(unknown)}):"
            f" {shown}; remove them from the text, or train from scratch without init_from"
        )
    return tokenizer


def with_tokenizer(settings: Settings, source: Source) -> Settings:
    """The settings with the tokenizer that given tokens have been encoded with.

    InputError if another setting of it was chosen.
    """
    if not (isinstance(source, TokenSource) and source.is_given):
        return settings
    tokenizer = source.tokenizer
    changes: dict[str, Any] = {"tokenizer": tokenizer.kind}
    if source.found.separator != tokenizer.separator:
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
    if training.epochs:
        changes["steps"] = training.epochs * Epochs(data, training.grad_accum_steps).steps
    frozen_parts(training.freeze, settings.model)  # raises early
    resolved = settings.replace(**changes)
    # Several processes choose their own, each on its machine.
    return resolved if launched() else resolved.replace(threads=choose_threads(run, resolved))


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
    run, distillation = settings.run, settings.distillation
    paths = {
        "init_from": run.init_from,
        "tokenizer": None if run.tokenizer in parts.TOKENIZERS else run.tokenizer,
        "teacher": distillation.teacher,
        "teacher_cache": distillation.teacher_cache,
    }
    absolute = {name: str(Path(path).resolve()) for name, path in paths.items() if path}
    texts = tuple(str(Path(path).resolve()) for path in paths_of(text))
    return settings.replace(**absolute, text=texts or None, out=out)


def build_training(
    settings: Settings,
    data: Dataset,
    tokenizer: Tokenizer,
    initial: Initial | None = None,
    group: Group = ALONE,
) -> Training:
    """The training that resolved settings describe; kernels run on its threads from now on.

    The model has the initial weights if there are any.

    If a teacher cache is set and does not exist, the teacher runs over the text now. InputError if
    the teacher does not fit the text.
    """
    use_threads(settings.run)
    config, distillation = settings.distillation, None
    if config.teacher:
        teacher, its_tokenizer = load_model(_model_file(config.teacher), settings.run.backend)
        _check_tokens(config.teacher, its_tokenizer, tokenizer)
        distillation = Distillation.of(teacher, config)
    model = new_model(settings, initial)
    return Training(model, data=data, distillation=distillation, group=group)


def new_model(settings: Settings, initial: Initial | None = None) -> TransformerModel:
    """The model of a new training, with the initial weights if there are any."""
    run, training = settings.run, settings.training
    model = TransformerModel(
        settings.model, seed=run.seed, backend=run.backend, freeze=training.freeze
    )
    if initial:
        model.flat.write(initial.model.parameters)
    model.use_precision(training.requested_precision)
    return model


def _check_tokens(teacher: str, of_teacher: Tokenizer, of_text: Tokenizer) -> None:
    if of_teacher.digest != of_text.digest:
        raise InputError(
            f"the tokens of the teacher {teacher} are not those of this text; use a teacher "
            "trained on text with the same characters, or train both with --tokenizer byte"
        )


def read_teacher(config: DistillationConfig, tokenizer: Tokenizer | None) -> Teacher | None:
    """The shape of the teacher, from its file's metadata: enough to estimate its memory.

    InputError if its tokens are not those of the tokenizer, if that is known.
    """
    if not config.teacher:
        return None
    file = _model_file(config.teacher)
    try:
        fields = safetensors.from_json(safetensors.read_metadata(file)["config"])
        model = from_saved(ModelConfig, fields)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is not a model saved by smallmind: {error}") from None
    if tokenizer:
        _check_tokens(config.teacher, read_tokenizer(file), tokenizer)
    return Teacher(model, config.teacher_top_k if config.teacher_cache else None)


def _model_file(teacher: str) -> Path:
    """The directory of a run or a model file -> the model file."""
    path = Path(teacher)
    return path / MODEL if path.is_dir() else path
