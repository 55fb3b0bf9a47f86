"""A model and its tokenizer from a run, a checkpoint, a model file or another program's."""

import dataclasses
import numbers
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from smallmind.checks import InputError, check_type, from_json, suggesting, whole
from smallmind.exchange.format import Foreign, find_foreign
from smallmind.files import safetensors
from smallmind.nn.transformer import WEIGHTS, TransformerModel, weights
from smallmind.runs.files import MODEL
from smallmind.settings.config import ModelConfig
from smallmind.settings.settings import from_saved
from smallmind.text.tokenizer import Tokenizer
from smallmind.training import checkpoint
from smallmind.training.checkpoint import BEST, CHECKPOINTS
from smallmind.training.state import RunState

Loaded = tuple[TransformerModel, Tokenizer]


class Found(NamedTuple):
    """A model on disk that is not built yet: its file, or the checkpoint that holds it."""

    source: Path | RunState | Foreign
    name: str  # such as "the best checkpoint, step 250"

    def load(self, backend: str = "numba", precision: str | None = None) -> Loaded:
        """Builds the model -> it and its tokenizer, as `smallmind.load` does."""
        if isinstance(self.source, RunState):
            return load_checkpoint(self.source, backend, precision)
        if isinstance(self.source, Foreign):
            return self.source.load(backend, precision)
        return load_model(self.source, backend, precision)

    def without_moments(self) -> "Found":
        """Drops what a checkpoint holds besides the weights."""
        if not isinstance(self.source, RunState):
            return self
        kept = {name: x for name, x in self.source.tensors.items() if name.startswith(WEIGHTS)}
        return self._replace(source=dataclasses.replace(self.source, tensors=kept))

    def fill(self, model: TransformerModel) -> None:
        """Gives a model with parameters of these shapes the weights. InputError as for `load`."""
        if isinstance(self.source, RunState):
            model.fill(weights(self.source.tensors), self.name)
        elif isinstance(self.source, Foreign):
            self.source.fill(model)
        else:
            model.fill_from(self.source)


@suggesting()
def load(
    path: str | PathLike[str],
    backend: str = "numba",
    checkpoint: int | str | None = None,
    precision: str | None = None,
) -> Loaded:
    """The directory of a run, a checkpoint or a model file -> its model and tokenizer.

    Also a directory of transformers, with safetensors, or a GGUF file. From a run: "newest", "best"
    or the checkpoint of a step; by default the final model, or the newest checkpoint if that is of
    a later step or the run has not ended yet. The run may be going. InputError if there is none.

    With a precision ("float32", "float16", "bfloat16" or "auto") the model only runs: its weights
    are in memory once, in that type, without gradients.
    """
    return find(path, checkpoint).load(backend, precision)


def find(path: str | PathLike[str], which: int | str | None = None) -> Found:
    """Like `load`, but the model is only found, not built."""
    check_type("path", path, str, PathLike)
    check_type("checkpoint", which, numbers.Integral, str, None)
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a run, a checkpoint or a model file")
    foreign = find_foreign(path)
    if foreign and which is not None:
        raise InputError(f"{path} is not a run: it has no checkpoint {which!r}")
    if foreign:
        return Found(foreign, foreign.name)
    if path.is_dir():
        return find_in_run(path, which)
    if which is not None:
        raise InputError(f"{path} is one file; give the run's directory to choose {which!r} in it")
    if "state" in safetensors.read_metadata(path):
        saved = checkpoint.load(path)
        return Found(saved, f"the checkpoint {path.name}, step {saved.step}")
    return Found(path, f"the model {path.name}")


def find_in_run(directory: Path, which: int | str | None = None) -> Found:
    """The model of a run: "newest", "best" or the checkpoint of a step.

    None is the final model, or "newest" if that is of a later step or there is no model yet.
    InputError if there is no such checkpoint.
    """
    if not directory.is_dir():
        raise InputError(f"{directory} is not the directory of a run")
    model, newest = directory / MODEL, checkpoint.peek(directory)
    if which is None and model.exists():
        step = _step_of(model)
        # A run that was interrupted or made longer leaves the model of an earlier step.
        if newest is None or step is None or newest.step <= step:
            place = "" if step is None else f", step {step}"
            return Found(model, f"the final model{place}")
    if which in (None, "newest"):
        found, skipped = checkpoint.newest(directory)
        if found is None:
            reasons = "".join(f"; {reason}" for _, reason in skipped)
            raise InputError(f"{directory} has neither a model nor a sound checkpoint{reasons}")
        return Found(found, f"the newest checkpoint, step {found.step}")
    found = checkpoint.load(_checkpoint_file(directory, which))
    best = "best " if which == "best" else ""
    return Found(found, f"the {best}checkpoint, step {found.step}")


def _step_of(model: Path) -> int | None:
    """The step that a model file was saved after; None if an earlier version wrote it."""
    with suppress(KeyError, ValueError):
        return whole(from_json(safetensors.read_metadata(model)["step"]))
    return None


def load_model(path: Path, backend: str = "numba", precision: str | None = None) -> Loaded:
    """The model and tokenizer in a model file. InputError if it does not hold both."""
    model = TransformerModel.load(path, backend, precision)
    tokenizer = read_tokenizer(path)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise InputError(f"{path}: tokenizer and model have different vocabularies")
    model.tokenizer_digest = tokenizer.digest
    return model, tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a model file, whose tensors are not read. InputError if it has none."""
    return _tokenizer(safetensors.read_metadata(path), str(path))


def load_checkpoint(
    saved: RunState, backend: str = "numba", precision: str | None = None
) -> Loaded:
    """The model and tokenizer as they were at a checkpoint."""
    place = f"the checkpoint of step {saved.step}"
    tokenizer = tokenizer_of(saved)
    try:
        config = from_saved(ModelConfig, saved.state["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place} does not describe its model: {error}") from None
    tensors = weights(saved.tensors)
    model = TransformerModel.from_tensors(config, tensors, place, backend, precision)
    model.tokenizer_digest = tokenizer.digest
    return model, tokenizer


def tokenizer_of(saved: RunState) -> Tokenizer:
    """The tokenizer that a checkpoint was made with. InputError if it has none."""
    return _tokenizer(saved.state, f"the checkpoint of step {saved.step}")


def _tokenizer(saved: Mapping[str, Any], place: str) -> Tokenizer:
    try:
        return Tokenizer.from_saved(saved["tokenizer"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place} has no tokenizer in its metadata: {error}") from None


def _checkpoint_file(directory: Path, which: int | str | None) -> Path:
    folder = directory / CHECKPOINTS
    if which == "best" and (folder / BEST).exists():
        return folder / BEST
    files: dict[int | str | None, Path] = {
        step: folder / checkpoint.file_name(step) for step in sorted(checkpoint.steps(directory))
    }
    if which not in files:
        raise InputError(
            f"{directory} has no checkpoint {which!r}; choose newest, best or one of the steps "
            f"{', '.join(map(str, files)) or '(none saved yet)'}"
        )
    return files[which]
