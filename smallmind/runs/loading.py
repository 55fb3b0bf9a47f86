"""A model and its tokenizer from a run, a checkpoint, a model file or another program's."""

import hashlib
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, from_json, suggesting, whole
from smallmind.exchange.format import Foreign, find_foreign
from smallmind.exchange.peft import PeftDirectory, find_peft
from smallmind.files import safetensors
from smallmind.nn.adapter import SavedAdapter
from smallmind.nn.loading import ADAPTER_FORMAT, Base, weights
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import padded
from smallmind.nn.transformer import TransformerModel
from smallmind.runs.files import IMPORTED, MODEL, PUBLISHED, TOKENIZER, model_in
from smallmind.settings.config import ModelConfig, Precision
from smallmind.settings.settings import from_saved
from smallmind.text.tokenizer import Tokenizer
from smallmind.training import checkpoint
from smallmind.training.checkpoint import BEST, CHECKPOINTS
from smallmind.training.state import RunState

Loaded = tuple[TransformerModel, Tokenizer]
NAME_BASE = "name the model that it belongs to: smallmind generate MODEL --adapter RUN"


class Found(NamedTuple):
    """A model on disk that is not built yet: its file, or the checkpoint that holds it."""

    source: Path | RunState | Foreign | PeftDirectory
    name: str  # such as "the best checkpoint, step 250"
    base: Path | None = None  # of an adapter; None: where it was when that was trained

    @property
    def is_adapter(self) -> bool:
        """True if it adapts another model, which it does not hold."""
        if isinstance(self.source, RunState):
            return bool(self.source.state.get("adapter"))
        if isinstance(self.source, PeftDirectory):
            return True
        return isinstance(self.source, Path) and _is_adapter(self.source)

    def load(self, backend: str = "numba", precision: str | None = None) -> Loaded:
        """Builds the model -> it and its tokenizer, as `smallmind.load` does."""
        if self.is_adapter:
            return self._load_adapted(backend, precision)
        if isinstance(self.source, RunState):
            return load_checkpoint(self.source, backend, precision)
        if isinstance(self.source, Foreign):
            return self.source.load(backend, precision)
        assert isinstance(self.source, Path)
        return load_model(self.source, backend, precision)

    def _load_adapted(self, backend: str, precision: str | None) -> Loaded:
        """The base with what an adapter adds to its matrices: added, or beside what is rounded."""
        adapter = self.adapter()
        if precision is None:
            model = TransformerModel.unfilled(adapter.config, backend)
            model.flat.write(self.parameters())
        else:
            model = adapter.model(backend, precision)
            model.flat.write(self._base_parameters(adapter))
        tokenizer = self.tokenizer()
        model.tokenizer_digest = tokenizer.digest
        return model, tokenizer

    @property
    def config(self) -> ModelConfig:
        """The settings of the model, read without its weights. InputError if they are wrong."""
        if self.is_adapter:
            return self.adapter().config
        if isinstance(self.source, Foreign):
            return self.source.config
        if isinstance(self.source, RunState):
            return _config(self.source.state, "model", f"the checkpoint of step {self.source.step}")
        assert isinstance(self.source, Path)
        try:
            saved = {"config": from_json(safetensors.read_metadata(self.source)["config"])}
        except (KeyError, ValueError) as error:
            raise InputError(f"{self.source} does not describe its model: {error}") from None
        return _config(saved, "config", str(self.source))

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. InputError if it has none."""
        if isinstance(self.source, RunState):
            return tokenizer_of(self.source)
        if isinstance(self.source, Path):
            return read_tokenizer(self.source)
        if isinstance(self.source, PeftDirectory):
            return self._base(self.source.base, self.name).tokenizer()
        return self.source.tokenizer()

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """The weights by name, float32, one after the other, with what an adapter adds to them.

        They have the order of `Parameters.ordered`. InputError if they are damaged, perhaps only
        after the last one.
        """
        if self.is_adapter:
            adapter = self.adapter()
            yield from adapter.added(self._base_parameters(adapter))
        elif isinstance(self.source, RunState):
            yield from self._own_parameters(weights(self.source.tensors))
        elif isinstance(self.source, Foreign):
            yield from self.source.parameters()
        else:
            assert isinstance(self.source, Path)
            with safetensors.streaming(self.source) as (tensors, _):
                pass  # checks the digest of the whole file
            if not all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
                tensors, _ = safetensors.open_tensors(self.source)
            yield from self._own_parameters(tensors)

    def _own_parameters(
        self, tensors: Mapping[str, np.ndarray | safetensors.StoredTensor]
    ) -> Iterator[tuple[str, np.ndarray]]:
        flat = declare_parameters(self.config)
        if {name: tensor.shape for name, tensor in tensors.items()} != flat.shapes:
            raise InputError(f"{self.name} does not hold the parameters that its config describes")
        for spec in flat.ordered:
            tensor = tensors[spec.name]
            value = tensor if isinstance(tensor, np.ndarray) else tensor.read()
            if value.dtype != np.float32 or not np.isfinite(value).all():
                raise InputError(f"{self.name}: {spec.name} is not finite float32")
            yield spec.name, value

    def adapter(self) -> SavedAdapter:
        """The adapter alone. InputError if it is none, or damaged."""
        if isinstance(self.source, PeftDirectory):
            base = self._base(self.source.base, self.name)
            path = self.base or Path(self.source.base.path if self.source.base else "")
            known = Base(str(path.resolve()), digest_of(base.parameters()))
            return self.source.adapter(base.config, known)
        if isinstance(self.source, RunState) and self.is_adapter:
            state = self.source.state
            place = f"the checkpoint of step {self.source.step}"
            tensors = weights(self.source.tensors)
            return SavedAdapter.of(place, state["model"], state["adapter"], tensors)
        if isinstance(self.source, Path) and self.is_adapter:
            return _read_adapter(self.source)
        raise InputError(f"{self.name} is not an adapter; train one with --lora-rank")

    def _base(self, known: Base | None, place: str) -> "Found":
        """The model that an adapter belongs to. InputError if nobody says where it is."""
        if self.base is None and known is None:
            raise InputError(f"{place} does not say what it adapts; {NAME_BASE}")
        path = self.base or Path(known.path if known else "")
        if not path.exists():
            raise InputError(f"{place} adapts {path}, which does not exist; {NAME_BASE}")
        return find(path)

    def _base_parameters(self, adapter: SavedAdapter) -> Iterator[tuple[str, np.ndarray]]:
        """The weights of its base. InputError, at the end, if that is another model."""
        base, sha = self._base(adapter.base, adapter.place), hashlib.sha256()
        shapes = declare_parameters(adapter.config).shapes
        for name, value in base.parameters():
            if value.shape != shapes.get(name):
                break
            _add_to_digest(sha, value)
            yield name, value
        if adapter.base and sha.hexdigest() != adapter.base.sha256:
            raise InputError(
                f"{adapter.place} adapts another model than {self.base or adapter.base.path} or "
                f"another state of it; {NAME_BASE}"
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


def precision_of(path: Path) -> str:
    """The precision in which a run was trained: its kernels are compiled. Else float32."""
    from smallmind.runs.directory import RunDirectory

    try:
        training = RunDirectory(path).load_config().settings.training
    except InputError:  # a file, or a model of another program
        return str(Precision.FLOAT32)
    # Blocks would be those of what was trained too, unless it is an adapter.
    precision = training.requested_precision
    return str(precision if training.adapter else precision.of_trained)


def find(
    path: str | PathLike[str],
    which: int | str | None = None,
    adapter: str | PathLike[str] | None = None,
) -> Found:
    """Like `load`, but the model is only found, not built."""
    check_type("path", path, str, PathLike)
    check_type("adapter", adapter, str, PathLike, None)
    if adapter is not None:
        found = find(adapter, which)
        if not found.is_adapter:
            raise InputError(f"{adapter} holds a whole model, not an adapter: name it alone")
        return found._replace(base=Path(path))
    check_type("checkpoint", which, numbers.Integral, str, None)
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a run, a checkpoint or a model file")
    foreign = find_foreign(path) or find_peft(path)
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
    model, newest = model_in(directory), checkpoint.peek(directory)
    _check_files(directory, TOKENIZER, PUBLISHED)
    if which is None and model and model.name == IMPORTED:
        _check_files(directory, IMPORTED)
        return Found(_imported(directory, model), "the imported model")
    if which is None and model:
        step = _step_of(model)
        # A run that was interrupted or made longer leaves the model of an earlier step.
        if newest is None or step is None or newest.step <= step:
            _check_files(directory, MODEL)
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


def _check_files(directory: Path, *names: str) -> None:
    """InputError if a file of a run is there but is not the one that the run has saved.

    Those of earlier versions, and of runs whose config.json is lost, are taken as they are.
    """
    from smallmind.runs.directory import RunDirectory, fault_of

    digests: Mapping[str, Sequence[str]] = {}
    with suppress(InputError):
        digests = RunDirectory(directory).load_config().sha256
    for path in (directory / name for name in names if name in digests):
        if path.exists() and (fault := fault_of(path, digests[path.name])):
            raise InputError(f"{path}: {fault}")


def _imported(directory: Path, model: Path) -> Foreign:
    """A model that was imported as it was, with the settings of its run: a shorter context."""
    from smallmind.runs.directory import RunDirectory

    foreign = find_foreign(model)
    assert foreign  # by its name
    foreign.config = RunDirectory(directory).load_config().settings.model
    return foreign


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


def digest_of(parameters: Iterable[tuple[str, np.ndarray]]) -> str:
    """The SHA-256 of a model's parameters, as runs keep it of what they start from.

    They are float32, in the order of `Parameters.ordered`: that of the vector of them.
    """
    sha = hashlib.sha256()
    for _, value in parameters:
        _add_to_digest(sha, value)
    return sha.hexdigest()


def _add_to_digest(sha: Any, value: np.ndarray) -> None:
    sha.update(np.ascontiguousarray(value).data)
    sha.update(bytes(value.itemsize * (padded(value.size) - value.size)))


def _config(saved: Mapping[str, Any], key: str, place: str) -> ModelConfig:
    """The config of a model in a file. InputError naming the place if it is wrong."""
    try:
        return from_saved(ModelConfig, saved[key])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place} does not describe its model: {error}") from None


def _is_adapter(path: Path) -> bool:
    """True if a model file holds an adapter alone."""
    return safetensors.read_metadata(path).get("format") == ADAPTER_FORMAT


def _read_adapter(path: Path) -> SavedAdapter:
    """The adapter in a file. InputError if it is damaged."""
    tensors, metadata = safetensors.read(path)
    try:
        facts, config = from_json(metadata["adapter"]), from_json(metadata["config"])
    except (KeyError, ValueError) as error:
        raise InputError(f"{path} is not an adapter saved by smallmind: {error}") from None
    return SavedAdapter.of(str(path), config, facts, tensors)


def load_checkpoint(
    saved: RunState, backend: str = "numba", precision: str | None = None
) -> Loaded:
    """The model and tokenizer as they were at a checkpoint."""
    place, tokenizer = f"the checkpoint of step {saved.step}", tokenizer_of(saved)
    config = _config(saved.state, "model", place)
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
