"""The parts of a run, built from its resolved settings: data, tokenizer, weights, loss."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smallmind import parts
from smallmind.checks import InputError, count_of
from smallmind.corpus.preparation import Encoding
from smallmind.exchange.stored import StoredModel, digest_of, find
from smallmind.forecast.threads import use_threads
from smallmind.losses.loss import Outline
from smallmind.nn.loading import Base
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import grown
from smallmind.nn.position import position_class
from smallmind.nn.transformer import TransformerModel
from smallmind.runs.files import TOKENIZER
from smallmind.runs.source import Source
from smallmind.settings.config import ModelConfig, RunConfig
from smallmind.settings.settings import Settings
from smallmind.text.char_tokenizer import CharTokenizer
from smallmind.text.dataset import Dataset
from smallmind.text.templates import (
    KnownTemplate,
    fit_template,
    headers_of,
    template_args,
    with_template_args,
)
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.training import Training


class Initial(NamedTuple):
    """The model that a run starts from, of which only the weights are still on disk."""

    found: StoredModel
    config: ModelConfig
    tokenizer: Tokenizer
    sha256: str  # of its parameters

    @classmethod
    def read(cls, run: RunConfig, sha256: str | None = None) -> "Initial | None":
        """Returns the model that init_from names, if any. InputError if it had another digest."""
        if run.init_from is None:
            return None
        found = find(run.init_from)
        initial = cls(found, found.config, found.tokenizer(), digest_of(found.parameters()))
        if sha256 and initial.sha256 != sha256:
            raise InputError(
                f"{run.init_from} has changed since the run was created; start a new run"
            )
        return initial

    @property
    def facts(self) -> dict[str, Any]:
        """The facts from which settings follow, by name."""
        config = self.config
        return {
            "start": config,
            "start_tokenizer": self.tokenizer.kind,
            "limits_context": position_class(config).limits_context,
            "pairs": (config.bigram_vocab or config.vocab_size) if config.bigram_rows else None,
        }

    def write_to(self, model: TransformerModel) -> None:
        """Gives a model its weights, one after the other, with rows for tokens that it lacks."""
        shapes, same = model.flat.shapes, declare_parameters(self.config).shapes
        if shapes | same == shapes:
            return self.found.write_to(model)
        parameters = self.found.parameters()
        model.flat.write((name, grown(value, shapes[name])) for name, value in parameters)


def fit_tokenizer(
    run: RunConfig, source: Source, encoding: Encoding, initial: Initial | None = None
) -> Tokenizer:
    """-> the tokenizer of a new run: that of its tokens or initial weights, or made from the text.

    A vocabulary of characters grows by those of the text that it lacks. InputError if that of the
    weights cannot.
    """
    args = template_args(run.template_args)
    if source.tokenizer and initial and source.tokenizer.digest == initial.tokenizer.digest:
        return with_template_args(initial.tokenizer, args)  # with what has been published of it
    if source.tokenizer:
        return with_template_args(source.tokenizer, args)
    tokenizer = encoding.tokenizer
    if isinstance(tokenizer, str):
        headers = headers_of(run.chat_template) if source.is_chat else ""
        text = source.text_to_learn if encoding.kind.is_learned else source.alphabet + headers
        tokenizer = Tokenizer(text, tokenizer, **encoding.settings)
    else:
        tokenizer = _with_characters(run, tokenizer, source.alphabet, initial)
    if not source.is_chat:
        return with_template_args(tokenizer, args)
    # A template needs its tokens.
    fitted, template = fit_template(tokenizer, run.chat_template)
    fitted = with_template_args(fitted, args)
    headers = "".join(template.before.values()) if isinstance(template, KnownTemplate) else ""
    return _with_characters(run, fitted, headers, initial)


def _with_characters(
    run: RunConfig, tokenizer: Tokenizer, text: str, initial: Initial | None
) -> Tokenizer:
    """Returns the tokenizer with characters that it lacks. InputError if its tokens are others."""
    if not (initial and (new := tokenizer.unknown(text))):
        return tokenizer
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer.with_characters(new)
    raise InputError(
        f"the text has {count_of(len(new), 'character')} that {run.init_from} does not know: "
        f"{_listed(new)}; train the base model with --tokenizer bpe, or drop --init-from"
    )


def _listed(characters: Sequence[str]) -> str:
    return ", ".join(map(repr, characters[:5])) + (", ..." if len(characters) > 5 else "")


def new_characters(before: Tokenizer, now: Tokenizer) -> str:
    """-> the characters that a vocabulary has got, as in "2 characters ('?', '!')"; or nothing."""
    if not (isinstance(before, CharTokenizer) and isinstance(now, CharTokenizer)):
        return ""
    new = sorted(set(now.characters) - set(before.characters))
    return f"{count_of(len(new), 'character')} ({_listed(new)})" if new else ""


def build_training(
    settings: Settings,
    data: Dataset,
    tokenizer: Tokenizer,
    initial: Initial | None = None,
    train: Callable[..., Training] = Training,
) -> Training:
    """Returns the training that resolved settings describe; kernels run on its threads from now on.

    The model has the initial weights if there are any.

    Files that the loss needs and that do not exist are made now, such as a teacher's logits.
    InputError if the loss does not fit the text. `train` makes the training of model, data, loss.
    """
    use_threads(settings.run)
    kind, config = settings.loss
    models = []
    for role, path in config.models.items() if config else ():
        other, its_tokenizer = find(path).load(settings.run.backend)
        _check_tokens(role, path, its_tokenizer, tokenizer)
        models.append(other)
    loss = parts.load(parts.LOSSES, kind).of(models, config)
    model = new_model(settings, initial)
    return train(model, data=data, loss=loss)


def new_model(settings: Settings, initial: Initial | None = None) -> TransformerModel:
    """Returns the model of a new training, with the initial weights if there are any."""
    run, training = settings.run, settings.training
    trained = {"seed": run.seed, "freeze": training.freeze, "adapter": training.adapter}
    precision = training.requested_precision
    if initial is None:
        model = TransformerModel(settings.model, backend=run.backend, **trained)
        model.use_precision(precision)
    else:
        config, backend = settings.model, run.backend
        model = TransformerModel.unfilled(config, backend, precision, trains=True, **trained)
        initial.write_to(model)
        if model.adapter and run.init_from:
            model.flat.initialise(run.seed, model.flat.kept)
            model.base = Base(run.init_from, initial.sha256)
    model.use_products(training.products)
    return model


def _check_tokens(role: str, path: str, of_model: Tokenizer, of_text: Tokenizer) -> None:
    if of_model.digest == of_text.digest:
        return
    file = Path(path) / TOKENIZER
    choice = str(file) if of_model.is_learned and file.exists() else of_model.kind
    if of_model.is_learned or of_model.kind != of_text.kind:
        raise InputError(f"the {role} {path} has different tokens: use --tokenizer {choice}")
    raise InputError(
        f"the {role} {path} has different tokens than this text; use a {role} trained on text with "
        "the same characters, or train both with --tokenizer byte"
    )


def outline_of(settings: Settings, tokenizer: Tokenizer | None) -> Outline:
    """Returns the loss of a run with the shapes of its models. InputError if tokens differ."""
    kind, config = settings.loss
    found = {(role, x): find(x) for role, x in config.models.items()} if config else {}
    for (role, path), model in found.items():
        if tokenizer:
            _check_tokens(role, path, model.tokenizer(), tokenizer)
    return Outline(kind, tuple(model.config for model in found.values()), config)
