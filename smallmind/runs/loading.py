"""A model and its tokenizer from a run, a checkpoint or a model file."""

from os import PathLike
from pathlib import Path

from smallmind import safetensors
from smallmind.config import InputError, ModelConfig, from_saved
from smallmind.nn.transformer import TransformerModel
from smallmind.runs.directory import MODEL
from smallmind.text.tokenizer import Tokenizer
from smallmind.training import checkpoint
from smallmind.training.checkpoint import BEST, CHECKPOINTS, NAME
from smallmind.training.state import RunState

WEIGHTS = "model."  # the prefix of a checkpoint's tensors that are parameters

Loaded = tuple[TransformerModel, Tokenizer]


def load(path: str | PathLike[str], backend: str = "numba") -> Loaded:
    """The directory of a run, a checkpoint or a model file -> its model and tokenizer.

    From a run: the final model, or the newest checkpoint if it has not ended yet. InputError if
    there is none.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a run, a checkpoint or a model file")
    if path.is_dir():
        return load_from_run(path, None, backend)
    if "state" in safetensors.read_metadata(path):
        return load_checkpoint(checkpoint.load(path), backend)
    return load_model(path, backend)


def load_from_run(
    directory: Path, which: int | str | None = None, backend: str = "numba"
) -> Loaded:
    """The model and tokenizer of a run: "newest", "best" or the checkpoint of a step.

    None is the final model, or "newest" if there is none yet. InputError if there is no such
    checkpoint.
    """
    if not directory.is_dir():
        raise InputError(f"{directory} is not the directory of a run")
    if which is None and (directory / MODEL).exists():
        return load_model(directory / MODEL, backend)
    if which in (None, "newest"):
        found, skipped = checkpoint.newest(directory)
        if found is None:
            reasons = "".join(f"; {reason}" for _, reason in skipped)
            raise InputError(f"{directory} has neither a model nor a sound checkpoint{reasons}")
        return load_checkpoint(found, backend)
    return load_checkpoint(checkpoint.load(_checkpoint_file(directory, which)), backend)


def load_model(path: Path, backend: str = "numba") -> Loaded:
    """The model and tokenizer in a model file. InputError if it does not hold both."""
    model = TransformerModel.load(path, backend)
    tokenizer = read_tokenizer(path)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise InputError(f"{path}: tokenizer and model have different vocabularies")
    return model, tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a model file, whose tensors are not read. InputError if it has none."""
    metadata = safetensors.read_metadata(path)
    try:
        return Tokenizer.from_state(safetensors.from_json(metadata["tokenizer"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} has no tokenizer in its metadata: {error}") from None


def load_checkpoint(saved: RunState, backend: str = "numba") -> Loaded:
    """The model and tokenizer as they were at a checkpoint."""
    place = f"the checkpoint of step {saved.step}"
    tokenizer = tokenizer_of(saved)
    try:
        config = from_saved(ModelConfig, saved.state["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place} does not describe its model: {error}") from None
    weights = {
        name.removeprefix(WEIGHTS): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith(WEIGHTS)
    }
    return TransformerModel.from_tensors(config, weights, place, backend), tokenizer


def tokenizer_of(saved: RunState) -> Tokenizer:
    """The tokenizer that a checkpoint was made with. InputError if it has none."""
    try:
        return Tokenizer.from_state(saved.state["tokenizer"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the checkpoint of step {saved.step} has no tokenizer: {error}") from None


def _checkpoint_file(directory: Path, which: int | str | None) -> Path:
    """The file of the checkpoint "best" or of a step."""
    folder = directory / CHECKPOINTS
    matches = map(NAME.fullmatch, (path.name for path in folder.glob("step-*")))
    by_step: dict[int | str | None, Path] = {
        int(match[1]): folder / match[0] for match in matches if match
    }
    steps = ", ".join(map(str, sorted(by_step)))  # type: ignore[type-var]
    by_step["best"] = folder / BEST
    if which not in by_step or not by_step[which].exists():
        raise InputError(
            f"{directory} has no checkpoint {which!r}; choose newest, best or one of the steps "
            f"{steps or '(none saved yet)'}"
        )
    return by_step[which]
