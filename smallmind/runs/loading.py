"""Models of this package on disk: model files, and runs with their checkpoints."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smallmind.checks import InputError, from_json, whole
from smallmind.exchange.format import ExternalModel, find_external
from smallmind.exchange.stored import Loaded, StoredAdapter, StoredModel
from smallmind.files import safetensors
from smallmind.nn import loading
from smallmind.nn.adapter import SavedAdapter
from smallmind.nn.loading import ADAPTER_FORMAT, weights
from smallmind.nn.network import declare_parameters
from smallmind.nn.transformer import TransformerModel
from smallmind.runs.directory import RunDirectory, fault_of
from smallmind.runs.files import CONFIG, IMPORTED, METRICS, MODEL, PUBLISHED, TOKENIZER, model_in
from smallmind.settings.config import ModelConfig, Precision
from smallmind.settings.settings import from_saved
from smallmind.text.tokenizer import Tokenizer
from smallmind.training import checkpoint
from smallmind.training.checkpoint import BEST, CHECKPOINTS
from smallmind.training.state import RunState


class _InFile:
    """The path of a file with a tokenizer."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    def tokenizer(self) -> Tokenizer:
        return _tokenizer(safetensors.read_metadata(self.path), str(self.path))


class ModelFile(_InFile, StoredModel):
    """A model file, with its tokenizer."""

    @functools.cached_property
    def config(self) -> ModelConfig:
        def read() -> Any:
            return from_json(safetensors.read_metadata(self.path)["config"])

        return _config(read, str(self.path))

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        with safetensors.streaming(self.path) as (tensors, _):
            pass  # checks the digest of the whole file
        if not all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
            tensors, _ = safetensors.open_tensors(self.path)
        return _parameters(self, tensors)

    def load(self, backend: str = "numba", precision: str | None = None) -> Loaded:
        tokenizer = self.tokenizer()
        model = loading.load(TransformerModel, self.path, backend, precision, tokenizer)
        if tokenizer.vocab_size != model.config.vocab_size:
            raise InputError(f"{self.path}: tokenizer and model have different vocabularies")
        return model, tokenizer


class AdapterFile(_InFile, StoredAdapter):
    """A model file of an adapter alone, with the tokenizer of both."""

    def adapter(self) -> SavedAdapter:
        tensors, metadata = safetensors.read(self.path)
        try:
            facts, config = from_json(metadata["adapter"]), from_json(metadata["config"])
        except (KeyError, ValueError) as error:
            raise InputError(f"{self.path} is not an adapter saved by smallmind: {error}") from None
        return SavedAdapter.of(str(self.path), config, facts, tensors)


class _InCheckpoint:
    """The state of a checkpoint, with a tokenizer."""

    def __init__(self, saved: RunState, name: str) -> None:
        self.saved, self.name = saved, name
        self.step: int | None = saved.step

    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.saved)


class Checkpoint(_InCheckpoint, StoredModel):
    """The model of a checkpoint, as it was then."""

    @functools.cached_property
    def config(self) -> ModelConfig:
        return _config(lambda: self.saved.state["model"], _step_name(self.saved))

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        return _parameters(self, weights(self.saved.tensors))

    def model(self, backend: str = "numba", precision: str | None = None) -> TransformerModel:
        tensors, source = weights(self.saved.tensors), _step_name(self.saved)
        return TransformerModel.from_tensors(self.config, tensors, source, backend, precision)


class AdapterCheckpoint(_InCheckpoint, StoredAdapter):
    """The adapter of a checkpoint, as it was then."""

    def adapter(self) -> SavedAdapter:
        state, tensors = self.saved.state, weights(self.saved.tensors)
        return SavedAdapter.of(_step_name(self.saved), state["model"], state["adapter"], tensors)


def precision_of(path: Path) -> str:
    """Returns the precision in which a run was trained: its kernels are compiled. Else float32."""
    try:
        training = RunDirectory(path).load_config().settings.training
    except InputError:  # a file, or a model of another program
        return str(Precision.FLOAT32)
    # Blocks would be those of what was trained too, unless it is an adapter.
    precision = training.requested_precision
    return str(precision if training.adapter else precision.of_trained)


def find_file(path: Path, which: int | str | None) -> StoredModel:
    """Finds the model in a file, perhaps a checkpoint. InputError if it is neither."""
    if which is not None:
        raise InputError(f"{path} is one file; give the run's directory to choose {which!r} in it")
    if "state" in safetensors.read_metadata(path):
        saved = checkpoint.load(path)
        return _of_checkpoint(saved, f"the checkpoint {path.name}, step {saved.step}")
    return _in_file(path, f"the model {path.name}")


def find_in_run(directory: Path, which: int | str | None = None) -> StoredModel | None:
    """Finds a model of a run: "newest", "best" or the checkpoint of a step; None in a file.

    Without `which` it is the final model, or "newest" if that is of a later step or there is no
    model yet. InputError if there is no such checkpoint.
    """
    if not directory.is_dir():
        return None
    model, newest = model_in(directory), checkpoint.peek(directory)
    _check_files(directory, TOKENIZER, PUBLISHED)
    if which is None and model and model.name == IMPORTED:
        _check_files(directory, IMPORTED)
        return _imported(directory, model)
    if which is None and model:
        step = _step_of(model)
        # A run that was interrupted or made longer leaves the model of an earlier step.
        if newest is None or step is None or newest.step <= step:
            _check_files(directory, MODEL)
            return _in_file(model, "the final model" + ("" if step is None else f", step {step}"))
    if which in (None, "newest"):
        found, skipped = checkpoint.newest(directory)
        if found is None:
            if missing := missing_from(directory):
                raise InputError(missing)
            reasons = "".join(f"; {reason}" for _, reason in skipped)
            raise InputError(f"{directory} has neither a model nor an intact checkpoint{reasons}")
        return _of_checkpoint(found, f"the newest checkpoint, step {found.step}")
    found = checkpoint.load(_checkpoint_file(directory, which))
    best = "best " if which == "best" else ""
    return _of_checkpoint(found, f"the {best}checkpoint, step {found.step}")


def missing_from(directory: Path) -> str | None:
    """-> the line about a directory with a part of a model of another program; None for others."""
    names = sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
    if METRICS in names:  # a run
        return None
    if files := [name for name in names if name.endswith(".gguf")]:
        one = "the GGUF file" if len(files) == 1 else "one of the GGUF files"
        return f"{directory} is a directory; give {one} in it, such as {directory / files[0]}"
    if CONFIG in names:
        return f"{directory / CONFIG} has no model_type, which names its architecture"
    if any(name.endswith(".safetensors") for name in names):
        return f"{directory} has weights, but no {CONFIG} that describes their architecture"
    if any(name.startswith("tokenizer") for name in names):
        return f"{directory} has a tokenizer, but no model: {CONFIG} and {MODEL} are missing"
    return None


def tokenizer_of(saved: RunState) -> Tokenizer:
    """Returns the tokenizer that a checkpoint was made with. InputError if it has none."""
    return _tokenizer(saved.state, _step_name(saved))


def _of_checkpoint(saved: RunState, name: str) -> StoredModel:
    is_adapter = bool(saved.state.get("adapter"))
    return AdapterCheckpoint(saved, name) if is_adapter else Checkpoint(saved, name)


def _in_file(path: Path, name: str) -> StoredModel:
    metadata = safetensors.read_metadata(path)
    if "config" not in metadata:
        raise InputError(
            missing_from(path.parent)
            or f"{path} was not saved by smallmind; for a Hugging Face model, give its folder"
        )
    is_adapter = metadata.get("format") == ADAPTER_FORMAT
    return AdapterFile(path, name) if is_adapter else ModelFile(path, name)


def _check_files(directory: Path, *names: str) -> None:
    """Raises InputError if a file is not the one that the run saved, as far as that is known."""
    digests: Mapping[str, Sequence[str]] = {}
    with suppress(InputError):
        digests = RunDirectory(directory).load_config().sha256
    for path in (directory / name for name in names if name in digests):
        if path.exists() and (fault := fault_of(path, digests[path.name])):
            raise InputError(f"{path}: {fault}")


def _imported(directory: Path, model: Path) -> ExternalModel:
    """Finds the model that was imported as it was; its run may shorten the context."""
    found = find_external(model)
    assert found  # by its name
    found.name = "the imported model"
    found.config = RunDirectory(directory).load_config().settings.model
    return found


def _step_of(model: Path) -> int | None:
    """Reads the step that a model file was saved after; None if an earlier version wrote it."""
    with suppress(KeyError, ValueError):
        return whole(from_json(safetensors.read_metadata(model)["step"]))
    return None


def _step_name(saved: RunState) -> str:
    return f"the checkpoint of step {saved.step}"


def _config(read: Callable[[], Any], source: str) -> ModelConfig:
    """Reads the config of a model in a file. InputError naming its source if it is wrong."""
    try:
        return from_saved(ModelConfig, read())
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source} does not describe its model: {error}") from None


def _tokenizer(saved: Mapping[str, Any], source: str) -> Tokenizer:
    try:
        return Tokenizer.from_saved(saved["tokenizer"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source} has no tokenizer in its metadata: {error}") from None


def _parameters(
    stored: StoredModel, tensors: Mapping[str, np.ndarray | safetensors.StoredTensor]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a file as parameters. InputError if they are not those of its model."""
    flat = declare_parameters(stored.config)
    if {name: tensor.shape for name, tensor in tensors.items()} != flat.shapes:
        raise InputError(f"{stored.name} does not hold the parameters that its config describes")
    for spec in flat.ordered:
        tensor = tensors[spec.name]
        value = tensor if isinstance(tensor, np.ndarray) else tensor.read()
        if value.dtype != np.float32 or not np.isfinite(value).all():
            raise InputError(f"{stored.name}: {spec.name} is not finite float32")
        yield spec.name, value


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
