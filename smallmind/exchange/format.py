"""Formats of other programs, and finding the one that a path is in."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from smallmind import parts
from smallmind.checks import InputError, check_type, suggesting
from smallmind.exchange.stored import StoredModel, check_no_run
from smallmind.exchange.tensors import (
    check_tensors,
    read_model,
    read_parameters,
    unread_parameters,
    write_model,
)
from smallmind.files.safetensors import Unread
from smallmind.kernels.number_types import BLOCK
from smallmind.nn.adapter import SavedAdapter
from smallmind.nn.loading import Stored
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.architectures import Layout
from smallmind.settings.config import ModelConfig
from smallmind.text.hf_tokenizer import HFTokenizer
from smallmind.text.tokenizer import Tokenizer

MAX_PADDING = 2**16  # tokens
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Exported(NamedTuple):
    """A model to write, what its tokens are, and what to say about it."""

    model: TransformerModel
    tokenizer: Tokenizer
    name: str
    history: Mapping[str, str]  # how it was trained: what -> how much


class ExternalModel(StoredModel):
    """A model of another program on disk, of which only the description is read so far."""

    path: Path
    config: ModelConfig
    is_external = True
    is_one_file: ClassVar[bool] = False  # a copy of `path` has all of it

    def tensors(self) -> tuple[Layout, Mapping[str, Stored]]:
        """Returns its names for our parameters, and its tensors. InputError if damaged."""
        raise NotImplementedError

    def check(self) -> None:
        """Reads all its tensors. InputError if they are damaged."""
        check_tensors(self.config, *self.tensors(), str(self.path))

    def model(self, backend: str = "numba", precision: str | None = None) -> TransformerModel:
        return read_model(self.config, *self.tensors(), str(self.path), backend, precision)

    def write_to(self, model: TransformerModel) -> None:
        write_model(model, self.config, *self.tensors(), str(self.path))

    def unread(self) -> dict[str, Unread]:
        """Returns its parameters by name, each of which is read when it is written.

        InputError if they are not those of its model.
        """
        return unread_parameters(self.config, *self.tensors(), str(self.path))

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        return read_parameters(self.config, *self.tensors(), str(self.path))


class ModelFormat:
    """A format of other programs. Each subclass is one, listed in `parts.FORMATS`."""

    types: ClassVar[tuple[str, ...]]  # that weights can be stored as, the default first

    def check_path(self, path: Path) -> None:
        """Raises InputError if `write` would not write there."""
        raise NotImplementedError

    def write(self, path: Path, exported: Exported, type: str) -> None:
        """Writes the model with weights of this type, all of it or nothing.

        InputError if it has no place in the format, OSError if the disk refuses it.
        """
        raise NotImplementedError

    def find(self, path: Path) -> ExternalModel | None:
        """-> the model at a path that looks like this format; None for others, or if it has none.

        InputError if it is malformed, or not supported.
        """
        del path
        return None


class AdapterFormat:
    """A format of adapters. Each subclass is one, listed in `parts.ADAPTER_FORMATS`."""

    def check_path(self, path: Path) -> None:
        """Raises InputError if `write` would not write there."""
        raise NotImplementedError

    def write(self, path: Path, adapter: SavedAdapter) -> None:
        """Writes an adapter, all of it or nothing. Errors as `ModelFormat.write`."""
        raise NotImplementedError


def check_file(
    path: Path, suffixes: Sequence[str], begins: Callable[[Path], bool], kind: str
) -> None:
    """Raises InputError if a file of this kind may not be written there."""
    if path.suffix not in suffixes:
        raise InputError(f"{path} must end in {suffixes[0]}")
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file")
    if os.path.lexists(path) and not begins(path):
        raise InputError(f"{path} already exists and {kind}; choose another name")


def open_format(name: str) -> ModelFormat:
    """Returns the format with this name. InputError if there is none."""
    if name not in parts.FORMATS:
        known = ", ".join([*parts.FORMATS, *parts.ADAPTER_FORMATS])
        raise InputError(f"format {name!r} must be one of {known}")
    return parts.load(parts.FORMATS, name)()


@suggesting()
def export(
    model: TransformerModel,
    tokenizer: Tokenizer,
    path: str | PathLike[str],
    to: str = "hf",
    type: str | None = None,
    name: str | None = None,
    history: Mapping[str, str] | None = None,
) -> None:
    """Writes a model for other programs: `to` is "hf", a directory of transformers, or "gguf".

    Or "html", a page with the model inside that runs in a browser, for which it may have any parts.
    `type` is that of the weights: "f32" (the default), "f16", "bf16" or, in GGUF, "q8_0", "q5_1",
    "q5_0", "q4_1" or "q4_0", blocks of integers that take from 8.5 to 4.5 bits per weight; in HTML
    "f32", "f16" or "q8_0". `name` and `history` (how the model was trained: what -> how much) are
    for its readers.
    InputError if no published architecture has the parts of the model, or the path is in use.
    """
    check_type("model", model, TransformerModel)
    check_type("tokenizer", tokenizer, Tokenizer)
    path = Path(check_type("path", path, str, PathLike))
    check_type("name", name, str, None)
    check_type("history", history, Mapping, None)
    type = check_export(path, to, type)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model "
            f"vocab_size={model.config.vocab_size}"
        )
    # A file name may have bytes that are not UTF-8, which arrive as lone surrogates.
    name = (name or path.stem).encode("utf-8", "replace").decode()
    open_format(to).write(path, Exported(model, tokenizer, name, history or {}), type)


@suggesting()
def export_adapter(adapter: SavedAdapter, path: str | PathLike[str], to: str = "peft") -> None:
    """Writes an adapter alone: `to` is "peft", a directory, or "gguf-adapter".

    InputError if no published architecture has the parts of its model, or the path is in use.
    """
    check_type("adapter", adapter, SavedAdapter)
    path = Path(check_type("path", path, str, PathLike))
    parts.load(parts.ADAPTER_FORMATS, to)().write(path, adapter)


def check_export(path: Path, to: str, type: str | None) -> str:
    """-> the type of weights. InputError if `export` or `export_adapter` would not write there."""
    if check_type("to", to, str) in parts.ADAPTER_FORMATS:
        if type is not None:
            raise InputError(f"type={type!r} is for whole models: leave it out with {to!r}")
        parts.load(parts.ADAPTER_FORMATS, to)().check_path(path)
        return "f32"
    format = open_format(check_type("to", to, str))
    type = check_type("type", type, str, None) or format.types[0]
    if type not in format.types:
        known = f"type={type!r} must be one of {', '.join(format.types)} with {to!r}"
        raise InputError(known + _only_read(type))
    format.check_path(path)
    return type


def _only_read(type: str) -> str:
    """Returns what a message adds about a type such as q4_K, or Q4_K_M, and "" about others."""
    for kind in parts.NUMBER_TYPES.values():
        if "store" not in kind.uses and type.lower().startswith(kind.name.lower()):
            reason = f"; {kind.name} can only be read"
            if kind.block > BLOCK:
                reason += f", as rows of small models are rarely multiples of {kind.block}"
            return reason
    return ""


def find_external(path: Path, which: int | str | None = None) -> ExternalModel | None:
    """Finds the model of another program at a path; None if there is something else."""
    if path.suffix in PICKLES and path.is_file():
        raise InputError(f"{path} is {explain_pickle(path.name)}, and give {path.parent}")
    for name in parts.FORMATS:
        if found := open_format(name).find(path):
            check_no_run(path, which)
            return found
    return None


def explain_pickle(name: str) -> str:
    """The name of a file of weights -> why it is not read, and what to do."""
    reason = "a pickle, which could run arbitrary code when loaded; "
    if not name.startswith("pytorch_model"):
        return f"{reason}save the model as safetensors with the program that wrote it"
    return (
        f'{reason}convert it in its directory: python -c "from transformers import '
        "AutoModelForCausalLM as M; M.from_pretrained('.').save_pretrained('.')\""
    )


def padded(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """-> the tokenizer with unused tokens at its end, up to the rows that a model has for them.

    Many models have more rows than tokens, a multiple of some number. InputError for fewer rows.
    """
    if isinstance(tokenizer, HFTokenizer):
        tokenizer = tokenizer.within(vocab_size)
    missing = vocab_size - tokenizer.vocab_size
    if missing == 0:
        return tokenizer
    if not 0 < missing <= MAX_PADDING:
        raise InputError(f"its tokenizer has {tokenizer.vocab_size} tokens, its model {vocab_size}")
    return tokenizer.with_special([f"[PAD{i}]" for i in range(tokenizer.vocab_size, vocab_size)])
