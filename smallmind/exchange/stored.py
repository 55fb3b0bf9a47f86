"""Models on disk: what each kind of them can do, and finding the one at a path."""

import functools
import hashlib
import numbers
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from smallmind import parts
from smallmind.checks import InputError, check_type, suggesting
from smallmind.nn.adapter import SavedAdapter
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import padded
from smallmind.nn.transformer import Base, TransformerModel
from smallmind.settings.config import ModelConfig
from smallmind.text.tokenizer import Tokenizer

Loaded = tuple[TransformerModel, Tokenizer]
NAME_BASE = "give its base model: smallmind generate MODEL --adapter RUN"


class StoredModel:
    """A model on disk that is not built yet. Each kind is a subclass, found by `parts.STORED`."""

    name: str  # such as "the best checkpoint, step 250"
    step: int | None = None  # after which its weights were saved, if that is known
    is_external = False  # written by another program
    is_adapter = False  # adapts another model, which it does not hold
    base: Path | None = None  # of an adapter; None: where it was when that was trained

    @functools.cached_property
    def config(self) -> ModelConfig:
        """Returns the settings of the model, read without its weights. InputError if wrong."""
        raise NotImplementedError

    def found_at(self, path: Path) -> str:
        """Returns its name with the path that a person has named."""
        return self.name if str(path) in self.name else f"{self.name}, of {path}"

    def tokenizer(self) -> Tokenizer:
        """Reads its tokenizer. InputError if it has none."""
        raise NotImplementedError

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the weights by name, float32, with what an adapter adds to them.

        They have the order of `Parameters.ordered`. InputError if they are damaged, perhaps only
        after the last one.
        """
        raise NotImplementedError

    def model(self, backend: str = "numba", precision: str | None = None) -> TransformerModel:
        """Builds the model with its weights, as `smallmind.load` does."""
        model = TransformerModel.unfilled(self.config, backend, precision)
        self.write_to(model)
        return model

    def write_to(self, model: TransformerModel) -> None:
        """Gives a model with the same shapes its weights, blocks of the same type as they are."""
        model.flat.write(self.parameters())

    def load(self, backend: str = "numba", precision: str | None = None) -> Loaded:
        """Builds the model -> it and its tokenizer, as `smallmind.load` does."""
        tokenizer = self.tokenizer()
        digest = tokenizer.digest  # before there is a model: it takes memory for a moment
        model = self.model(backend, precision)
        model.tokenizer_digest = digest
        return model, tokenizer

    def adapter(self) -> SavedAdapter:
        """Reads the adapter alone. InputError if it is none, or damaged."""
        raise InputError(f"{self.name} is not an adapter; train one with --lora-rank")


class StoredAdapter(StoredModel):
    """An adapter, loaded with its base: its part is added, or beside what is rounded."""

    is_adapter = True

    @functools.cached_property
    def config(self) -> ModelConfig:
        return self.adapter().config

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        adapter = self.adapter()
        return adapter.added(self._base_parameters(adapter))

    def model(self, backend: str = "numba", precision: str | None = None) -> TransformerModel:
        if precision is None:
            return super().model(backend)
        adapter = self.adapter()
        for _ in self._base_parameters(adapter):  # is it the one that the adapter was trained on?
            pass
        model = adapter.model(backend, precision)
        self.stored_base(adapter.base, adapter.place).write_to(model)
        return model

    def stored_base(self, known: Base | None, adapter: str) -> StoredModel:
        """Finds the model that it belongs to. InputError if nobody says where it is."""
        if self.base is None and known is None:
            raise InputError(f"{adapter} does not say what it adapts; {NAME_BASE}")
        path = self.base or Path(known.path if known else "")
        if not path.exists():
            raise InputError(f"{adapter} adapts {path}, which does not exist; {NAME_BASE}")
        return find(path)

    def _base_parameters(self, adapter: SavedAdapter) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the weights of its base. InputError, at the end, if that is another model."""
        base, sha = self.stored_base(adapter.base, adapter.place), hashlib.sha256()
        shapes = declare_parameters(adapter.config).shapes
        for name, value in base.parameters():
            if value.shape != shapes.get(name):
                break
            _add_to_digest(sha, value)
            yield name, value
        if adapter.base and sha.hexdigest() != adapter.base.sha256:
            raise InputError(
                f"{adapter.place} was not trained on {self.base or adapter.base.path}, or that "
                f"has changed since; {NAME_BASE}"
            )


@suggesting()
def load(
    path: str | PathLike[str],
    backend: str = "numba",
    checkpoint: int | str | None = None,
    precision: str | None = None,
    adapter: str | PathLike[str] | None = None,
) -> Loaded:
    """The directory of a run, a checkpoint or a model file -> its model and tokenizer.

    Also a directory of transformers, with safetensors, or a GGUF file. From a run: "newest", "best"
    or the checkpoint of a step; by default the final model, or the newest checkpoint if that is of
    a later step or the run has not ended yet. The run may be going. InputError if there is none.

    With a precision ("float32", "float16", "bfloat16", "q8_0", "q4_0" or "auto") the model only
    runs: its weights are in memory once, in that type, without gradients.

    Of a run with an adapter it is the base and what the adapter adds: one model, or with a
    precision both, as in training. With `adapter`, such a run or a directory of PEFT, `path` is
    that base and `checkpoint` one of the run's.
    """
    return find(path, checkpoint, adapter).load(backend, precision)


def find(
    path: str | PathLike[str],
    which: int | str | None = None,
    adapter: str | PathLike[str] | None = None,
) -> StoredModel:
    """Finds a model without building it. Arguments and errors as `load`."""
    check_type("path", path, str, PathLike)
    check_type("adapter", adapter, str, PathLike, None)
    if adapter is not None:
        found = find(adapter, which)
        if not found.is_adapter:
            raise InputError(f"{adapter} holds a whole model, not an adapter: give it on its own")
        found.base = Path(path)
        return found
    check_type("checkpoint", which, numbers.Integral, str, None)
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a run, a checkpoint or a model file")
    finders = (parts.load(parts.STORED, name) for name in parts.STORED)
    found_by_any: Iterator[StoredModel | None] = (finder(path, which) for finder in finders)
    return next(filter(None, found_by_any))  # the last one finds a file, or says what is wrong


def check_no_run(path: Path, which: int | str | None) -> None:
    """Raises InputError if a checkpoint is asked for of a path that is not a run."""
    if which is not None:
        raise InputError(f"{path} is not a run: it has no checkpoint {which!r}")


def digest_of(parameters: Iterable[tuple[str, np.ndarray]]) -> str:
    """Returns the SHA-256 of a model's parameters, as runs keep it of what they start from.

    They are float32, in the order of `Parameters.ordered`: that of the vector of them.
    """
    sha = hashlib.sha256()
    for _, value in parameters:
        _add_to_digest(sha, value)
    return sha.hexdigest()


def _add_to_digest(sha: Any, value: np.ndarray) -> None:
    sha.update(np.ascontiguousarray(value).data)
    sha.update(bytes(value.itemsize * (padded(value.size) - value.size)))
