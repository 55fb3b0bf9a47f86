"""A model and its tokenizer from a run, a checkpoint, a model file or another program's."""

import hashlib
import numbers
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, from_json, suggesting, whole
from smallmind.exchange.format import Foreign, find_foreign
from smallmind.files import safetensors
from smallmind.nn.growing import grown
from smallmind.nn.lora import low_rank_product, separate_widths
from smallmind.nn.network import declare_parameters
from smallmind.nn.transformer import ADAPTER_FORMAT, Base, TransformerModel, weights
from smallmind.runs.files import MODEL
from smallmind.settings.config import Adapter, ModelConfig
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

    @property
    def is_adapter(self) -> bool:
        """True if it adapts another model, which it does not hold."""
        if isinstance(self.source, RunState):
            return bool(self.source.state.get("adapter"))
        return isinstance(self.source, Path) and _is_adapter(self.source)

    def load(self, backend: str = "numba", base: Path | None = None) -> Loaded:
        """Builds the model -> it and its tokenizer.

        With an adapter, the model that it was trained beside, with what it adds to its matrices;
        that model is at `base`, by default where it was then.
        """
        if base and not self.is_adapter:
            raise InputError(
                f"{self.name} is a whole model, not an adapter: leave one of the two out"
            )
        if isinstance(self.source, RunState):
            return load_checkpoint(self.source, backend, base)
        if isinstance(self.source, Foreign):
            return self.source.load(backend)
        return load_model(self.source, backend, base)


@suggesting()
def load(
    path: str | PathLike[str],
    backend: str = "numba",
    checkpoint: int | str | None = None,
    adapter: str | PathLike[str] | None = None,
) -> Loaded:
    """The directory of a run, a checkpoint or a model file -> its model and tokenizer.

    Also a directory of transformers, with safetensors, or a GGUF file. From a run: "newest", "best"
    or the checkpoint of a step; by default the final model, or the newest checkpoint if that is of
    a later step or the run has not ended yet. The run may be going. InputError if there is none.

    Of a run with an adapter it is one model, the base and what the adapter adds. With `adapter`,
    such a run or file, `path` is that base and `checkpoint` one of the adapter's.
    """
    check_type("adapter", adapter, str, PathLike, None)
    if adapter is None:
        return find(path, checkpoint).load(backend)
    check_type("path", path, str, PathLike)
    return find(adapter, checkpoint).load(backend, Path(path))


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


def load_model(path: Path, backend: str = "numba", base: Path | None = None) -> Loaded:
    """The model and tokenizer in a model file. InputError if it does not hold both."""
    tokenizer = read_tokenizer(path)
    if _is_adapter(path):
        model = _read_adapter(path).merged(backend, base)
    else:
        model = TransformerModel.load(path, backend)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise InputError(f"{path}: tokenizer and model have different vocabularies")
    model.tokenizer_digest = tokenizer.digest
    return model, tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a model file, whose tensors are not read. InputError if it has none."""
    return _tokenizer(safetensors.read_metadata(path), str(path))


class SavedAdapter(NamedTuple):
    """An adapter in a file, and the model that it was trained beside."""

    place: str
    config: ModelConfig  # of both together
    adapter: Adapter
    base: Base | None
    tensors: Mapping[str, np.ndarray]

    @classmethod
    def of(
        cls, place: str, config: Any, facts: Any, tensors: Mapping[str, np.ndarray]
    ) -> "SavedAdapter":
        """Checks the `TransformerModel.adapter_facts` of a file. InputError if they are wrong."""
        try:
            base = facts["base"]
            adapter = Adapter.from_saved(facts)
            model = from_saved(ModelConfig, config)
            base = base and Base(
                check_type("path", base["path"], str), check_type("sha256", base["sha256"], str)
            )
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            if model.n_layer > len(shapes):
                raise ValueError("it has too few tensors")
            flat = declare_parameters(model, adapter)
            if shapes != {name: flat.shapes[name] for name in flat.kept}:
                raise ValueError("its tensors are not those of such an adapter")
            for name, tensor in tensors.items():
                if tensor.dtype != np.float32 or not np.isfinite(tensor).all():
                    raise ValueError(f"{name} is not finite float32")
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{place} is not an adapter saved by smallmind: {error}") from None
        return cls(place, model, adapter, base, tensors)

    def merged(self, backend: str = "numba", at: Path | None = None) -> TransformerModel:
        """The model that computes the same as the base and the adapter together.

        `at` is where the base is, by default where it was. InputError if it is another model.
        """
        model = self._base(at)
        parameters = dict(grown(model.parameters, declare_parameters(self.config).shapes))
        del model
        for spec in declare_parameters(self.config).specs:
            layer = spec.name.removesuffix("weight")
            if (a := self.tensors.get(layer + "lora_a")) is not None:
                b = self.tensors[layer + "lora_b"]
                widths = separate_widths(self.config, spec.shape, spec.widths)
                added = low_rank_product(a, b, widths, self.adapter.scale)
                parameters[spec.name] = parameters[spec.name] + added
        return TransformerModel.from_tensors(self.config, parameters, self.place, backend)

    def _base(self, at: Path | None) -> TransformerModel:
        """The model that the adapter was trained beside. InputError if it cannot be found."""
        advice = "name the model that it was trained beside: smallmind generate MODEL --adapter RUN"
        if at is None and self.base is None:
            raise InputError(f"{self.place} does not say what it adapts; {advice}")
        path = at or Path(self.base.path if self.base else "")
        if not path.exists():
            raise InputError(f"{self.place} adapts {path}, which does not exist; {advice}")
        model, _ = find(path).load("numpy")
        if self.base and digest_of(model) != self.base.sha256:
            raise InputError(
                f"{self.place} adapts another model than {path} or another state of it; {advice}"
            )
        return model


def digest_of(model: TransformerModel) -> str:
    """The SHA-256 of a model's parameters, as runs keep it of what they start from."""
    return hashlib.sha256(model.flat.data.data).hexdigest()


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


def load_checkpoint(saved: RunState, backend: str = "numba", base: Path | None = None) -> Loaded:
    """The model and tokenizer as they were at a checkpoint."""
    place = f"the checkpoint of step {saved.step}"
    tokenizer = tokenizer_of(saved)
    try:
        config = from_saved(ModelConfig, saved.state["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place} does not describe its model: {error}") from None
    if facts := saved.state.get("adapter"):
        adapter = SavedAdapter.of(place, saved.state["model"], facts, weights(saved.tensors))
        model = adapter.merged(backend, base)
    else:
        model = TransformerModel.from_tensors(config, weights(saved.tensors), place, backend)
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
