"""From settings to a Training that is ready to start: text, tokenizer, teacher and model."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallmind import parts
from smallmind.checks import InputError
from smallmind.corpus.preparation import Encoding
from smallmind.files import safetensors
from smallmind.nn.position import position_class
from smallmind.nn.transformer import TransformerModel, resolve_precision
from smallmind.parallel.environment import launched
from smallmind.parallel.group import ALONE, Group
from smallmind.runs.files import MODEL
from smallmind.runs.loading import find, load_model, read_tokenizer
from smallmind.runs.source import Source, TextSource, TokenSource, paths_of
from smallmind.runs.threads import choose_threads, use_threads
from smallmind.settings.config import DistillationConfig, ModelConfig, Precision, RunConfig
from smallmind.settings.settings import Settings, from_saved
from smallmind.text.bpe_tokenizer import BPETokenizer
from smallmind.text.dataset import HELD_OUT, Dataset
from smallmind.text.samplers import Epochs
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.distillation import Distillation
from smallmind.training.memory_estimate import Teacher
from smallmind.training.training import Training


class Initial(NamedTuple):
    """The weights that a run starts from, with their tokenizer."""

    weights: np.ndarray  # all parameters, as `model.flat.data`
    config: ModelConfig
    tokenizer: Tokenizer

    @property
    def sha256(self) -> str:
        """SHA-256 of the weights."""
        return hashlib.sha256(self.weights.tobytes()).hexdigest()


def make_dataset(settings: Settings, source: Source, tokenizer: Tokenizer) -> Dataset:
    """The dataset that settings describe. InputError if the text is too short."""
    run = settings.run
    return source.dataset(tokenizer, settings.model.block_size, run.batch_size, run.seed)


def encoding_of(run: RunConfig, initial: Initial | None = None) -> Encoding:
    """How the text of a new run becomes tokens."""
    tokenizer: str | Tokenizer = run.tokenizer
    if initial:
        tokenizer = initial.tokenizer
    elif run.tokenizer not in parts.TOKENIZERS:
        tokenizer = Tokenizer.load(run.tokenizer)
    return Encoding(tokenizer, run.bpe_vocab_size, run.bpe_split, run.text_separator)


def read_initial(run: RunConfig) -> Initial | None:
    """The weights that init_from names; None if it is not set."""
    if run.init_from is None:
        return None
    model, tokenizer = find(run.init_from).load("numpy")
    return Initial(model.flat.data, model.config, tokenizer)


def reread_initial(run: RunConfig, sha256: str | None) -> Initial | None:
    """Reads the weights that a run was created with. InputError if they have changed since then."""
    initial = read_initial(run)
    if initial and initial.sha256 != sha256:
        raise InputError(f"{run.init_from} has changed since the run was created; start a new run")
    return initial


def with_initial(settings: Settings, initial: Initial) -> Settings:
    """The settings with the model and the kind of tokenizer that these weights need.

    Only dropout is a free choice, and without an embedding of positions a shorter context.
    InputError if another of their settings was chosen differently.
    """
    fixed = {**dataclasses.asdict(initial.config), "tokenizer": initial.tokenizer.kind}
    fixed["mask_documents"] = initial.config.document_token is not None
    del fixed["dropout"], fixed["vocab_size"]
    fixed["block_size"] = shortened(initial.config, settings.model.block_size).block_size
    for config in (settings.model, settings.run):
        for field in dataclasses.fields(config):
            chosen, value = getattr(config, field.name), fixed.get(field.name)
            if field.name in fixed and chosen not in (value, field.default):
                raise InputError(
                    f"{field.name}={chosen!r} contradicts {settings.run.init_from}, whose weights "
                    f"have {field.name}={value!r}; leave it out"
                )
    # The vocabulary too, which the document_token is one of.
    return settings.replace(**fixed, vocab_size=initial.config.vocab_size)


def shortened(config: ModelConfig, block_size: int) -> ModelConfig:
    """The config with a shorter context, if its positions are not learned and it was chosen."""
    default = next(f.default for f in dataclasses.fields(ModelConfig) if f.name == "block_size")
    if position_class(config).limits_context or block_size in (default, config.block_size):
        return config
    if block_size > config.block_size:
        return config
    return dataclasses.replace(config, block_size=block_size)


def fit_tokenizer(settings: Settings, source: Source, initial: Initial | None = None) -> Tokenizer:
    """The tokenizer of a new run: that of its tokens or initial weights, or made from the text.

    InputError if the tokenizer of the weights does not know all characters of the text.
    """
    if source.tokenizer and initial and source.tokenizer.digest == initial.tokenizer.digest:
        return initial.tokenizer  # with what has been published of it
    if source.tokenizer:
        return source.tokenizer
    assert isinstance(source, TextSource)
    if initial is None:
        return _own_tokenizer(settings.run, source)
    if unknown := initial.tokenizer.unknown(source.text):
        shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        raise InputError(
            f"the text has characters that {settings.run.init_from} does not know ({len(unknown)}):"
            f" {shown}; remove them from the text, or train from scratch without init_from"
        )
    return initial.tokenizer


def _own_tokenizer(run: RunConfig, source: TextSource) -> Tokenizer:
    """The tokenizer that settings name: one of a file, or fitted to the text."""
    if run.tokenizer not in parts.TOKENIZERS:
        return Tokenizer.load(run.tokenizer)
    if run.tokenizer == "bpe":
        held_out = source.held_out or int(len(source.text) * HELD_OUT)
        trained_on = source.text[: len(source.text) - held_out]
        return Tokenizer(trained_on, "bpe", vocab_size=run.bpe_vocab_size, split=run.bpe_split)
    return Tokenizer(source.text, run.tokenizer)


def with_tokenizer(settings: Settings, source: Source) -> Settings:
    """The settings with the tokenizer that given tokens have been encoded with.

    InputError if another size or split of its vocabulary was chosen.
    """
    if not (isinstance(source, TokenSource) and source.is_given):
        return settings
    changes: dict[str, Any] = {"tokenizer": source.tokenizer.kind}
    if source.found.separator != source.tokenizer.separator:
        changes["text_separator"] = source.found.separator
    if isinstance(source.tokenizer, BPETokenizer):
        changes["bpe_vocab_size"] = source.tokenizer.vocab_size
        changes["bpe_split"] = source.tokenizer.split
    for name, flag in (("bpe_vocab_size", "--vocab-size"), ("bpe_split", "--split")):
        chosen, default = getattr(settings.run, name), getattr(RunConfig, name)
        if name in changes and chosen not in (changes[name], default):
            raise InputError(
                f"{flag} {chosen} contradicts {source.found.place}, whose vocabulary has "
                f"{changes[name]}; leave it out"
            )
    return settings.replace(**changes)


def with_vocabulary(settings: Settings, tokenizer: Tokenizer) -> ModelConfig:
    """The model with vocab_size and, if documents are masked, document_token.

    InputError if no token separates them.
    """
    token = settings.model.document_token
    if settings.run.mask_documents and token is None:
        token = tokenizer.separator_token
        if settings.run.text_separator:
            token = tokenizer.token_of(settings.run.text_separator)
        if token is None:
            raise InputError(
                f"mask_documents=True needs a token between documents, and {tokenizer!r} has none: "
                "leave it out, or choose --tokenizer bpe, which has <|endoftext|>"
            )
    return dataclasses.replace(
        settings.model, vocab_size=tokenizer.vocab_size, document_token=token
    )


def resolve_settings(settings: Settings, data: Dataset, tokenizer: Tokenizer) -> Settings:
    """The settings with everything that follows from the text and the machine filled in.

    That is vocab_size, document_token, steps if epochs are set, min_lr, threads and the precision:
    AUTO would mean another one on another CPU. InputError if the machine has fewer threads, or
    documents are to be masked and no token separates them.
    """
    run, training = settings.run, settings.training
    if training.precision == Precision.AUTO:
        precision = resolve_precision(Precision.AUTO, run.backend)
        training = dataclasses.replace(training, precision=precision.value)
    if training.epochs:
        steps = training.epochs * Epochs(data, training.grad_accum_steps).steps
        training = dataclasses.replace(training, steps=steps)
    resolved = Settings(
        model=with_vocabulary(settings, tokenizer),
        training=training.with_min_lr(),
        run=run,
        distillation=settings.distillation,
    )
    # Several processes choose their own, each on its machine.
    return resolved if launched() else resolved.replace(threads=choose_threads(run, resolved))


class Prepared(NamedTuple):
    """Settings with everything resolved, the data, and the digest of the initial weights."""

    settings: Settings
    data: Dataset
    initial_sha256: str | None


def prepare(settings: Settings, source: Source, initial: Initial | None) -> Prepared:
    """Everything that a new run needs to know before its directory is made.

    InputError if the text is too short or does not fit the weights that the run starts from.
    """
    if initial:
        settings = with_initial(settings, initial)
    tokenizer = fit_tokenizer(settings, source, initial)
    settings = with_tokenizer(settings, source)
    data = make_dataset(settings, source, tokenizer)
    settings = resolve_settings(settings, data, tokenizer)
    return Prepared(settings, data, initial.sha256 if initial else None)


def absolute_paths(settings: Settings) -> Settings:
    """The settings with paths that are valid from any directory; `out` stays as given."""
    fields = {
        "init_from": settings.run.init_from,
        "tokenizer": _file_of_tokenizer(settings.run),
        "teacher": settings.distillation.teacher,
        "teacher_cache": settings.distillation.teacher_cache,
    }
    return settings.replace(
        **{name: str(Path(path).resolve()) for name, path in fields.items() if path},
        text=tuple(str(Path(path).resolve()) for path in paths_of(settings.run.text)) or None,
    )


def _file_of_tokenizer(run: RunConfig) -> str | None:
    """The tokenizer.json that settings name, if they do."""
    return None if run.tokenizer in parts.TOKENIZERS else run.tokenizer


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
    run = settings.run
    use_threads(run)
    distillation = load_distillation(settings.distillation, run.backend, tokenizer)
    model = TransformerModel(
        **dataclasses.asdict(settings.model), seed=run.seed, backend=run.backend
    )
    if initial:
        model.flat.data[:] = initial.weights
    model.use_precision(settings.training.requested_precision)
    return Training(model, data=data, distillation=distillation, group=group)


def load_distillation(
    config: DistillationConfig, backend: str, tokenizer: Tokenizer
) -> Distillation | None:
    """The teacher, or None if none is set. InputError if its tokens are not the tokenizer's."""
    if not config.teacher:
        return None
    teacher, teacher_tokenizer = load_model(_model_file(config.teacher), backend)
    _check_tokens(config.teacher, teacher_tokenizer, tokenizer)
    return Distillation(
        teacher,
        config.temperature,
        config.alpha,
        config.learn_temperature,
        config.teacher_cache,
        config.teacher_top_k,
    )


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
