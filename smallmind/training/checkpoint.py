"""The whole state of a run on disk, so that it goes on from there as if nothing had happened.

A run's directory holds `checkpoints/step-<step>.safetensors`, the newest few, and
`checkpoints/best.safetensors`.
"""

import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from smallmind import durable, safetensors
from smallmind.config import InputError

CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
NAME = re.compile(r"step-([0-9]{8,})\.safetensors")
FORMAT = "smallmind checkpoint 1"


@dataclass(frozen=True)
class Checkpoint:
    """What a run is after `step` updates: tensors by name, and all else as JSON-able `state`.

    Numbers in state come back to the bit; tuples come back as lists. NaN and infinities are not
    JSON: None stands for what is not known yet.
    """

    step: int
    tensors: Mapping[str, np.ndarray]
    state: dict[str, Any]


def save(
    directory: str | PathLike[str], checkpoint: Checkpoint, keep: int = 3, best: bool = False
) -> None:
    """Writes a run's checkpoint, where `best` also as the best one; only then removes older ones.

    The newest `keep` stay. Those of later steps go: a run that was resumed before them has left
    them behind. OSError where the disk does not take it, FloatingPointError where a tensor has NaN
    or Inf; what was there stays then.
    """
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype.kind == "f" and tensor.size and not _is_finite(tensor):
            raise FloatingPointError(f"{name} has NaN or Inf: not saved over what is sound")
    folder = _folder(directory)
    metadata = {
        "format": FORMAT,
        "step": str(checkpoint.step),
        "state": safetensors.to_json(checkpoint.state),
    }
    durable.make_directory(folder)
    # The best one first: the state in the other says that it is there.
    for name in [BEST, _name(checkpoint.step)] if best else [_name(checkpoint.step)]:
        safetensors.write(folder / name, checkpoint.tensors, metadata)
    steps = _steps(folder)
    past = [step for step in steps if step <= checkpoint.step]
    for step in set(steps) - set(past[: max(1, keep)]):
        durable.remove(folder / _name(step))


def load(path: str | PathLike[str]) -> Checkpoint:
    """The checkpoint that `save` wrote. InputError where the file is not sound or is another."""
    path = Path(path)
    tensors, metadata = safetensors.read(path, strict=True)
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} is not a checkpoint that this version reads, {FORMAT!r}")
    try:
        step, state = int(metadata["step"]), safetensors.from_json(metadata["state"])
    except (KeyError, ValueError) as error:
        raise InputError(f"{path} is not a checkpoint of smallmind: {error}") from None
    if step < 0 or not isinstance(state, dict) or path.name not in (_name(step), BEST):
        raise InputError(f"{path} is not the checkpoint that its name says")
    return Checkpoint(step, tensors, state)


def newest(directory: str | PathLike[str]) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """A run's newest sound checkpoint, and the files passed over, each with a line that says why.

    The best one is only asked where another was passed over. None where no checkpoint is sound.
    """
    folder = _folder(directory)
    found: Checkpoint | None = None
    passed_over: list[tuple[Path, str]] = []
    for path in _files(folder):
        if found and (path.name != BEST or not passed_over):
            continue
        try:
            checkpoint = load(path)
        except InputError as error:
            passed_over.append((path, str(error)))
        else:
            found = checkpoint if not found or checkpoint.step > found.step else found
    return found, passed_over


def verify(directory: str | PathLike[str]) -> list[tuple[Path, str | None]]:
    """Every checkpoint of a run, newest first and the best one last, with what is wrong or None."""
    return [(path, _fault(path)) for path in _files(_folder(directory))]


def copy_into(checkpoint: Checkpoint, copies: dict[str, np.ndarray]) -> Checkpoint:
    """The same, in arrays of its own: those in copies, which hold it until they are used again."""
    for name in copies.keys() - checkpoint.tensors.keys():
        del copies[name]
    for name, tensor in checkpoint.tensors.items():
        copy = copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = copies[name] = np.empty(tensor.shape, tensor.dtype)
        np.copyto(copy, tensor)
    state = safetensors.from_json(safetensors.to_json(checkpoint.state))
    return Checkpoint(checkpoint.step, copies, state)


def new_directory(directory: str | PathLike[str]) -> Path:
    """Makes the directory of a run that is to start, where there is none yet.

    InputError where it holds checkpoints already; OSError where it cannot be made.
    """
    if found := _files(_folder(directory)):
        raise InputError(f"{found[0].parent} holds checkpoints of another run; choose another")
    Path(directory).mkdir(parents=True, exist_ok=True)
    return Path(directory)


class BackgroundSaver:
    """Saves the checkpoints of the run in `directory` while the run goes on.

    `failure` is why the last save that ended has failed, None where it went well. What failed is
    tried again at the next call. A save that is under way when the program ends is finished first;
    `close` also tells how it went.
    """

    def __init__(self, directory: str | PathLike[str], keep: int = 3) -> None:
        self.directory = Path(directory)
        self.keep = keep
        self.failure: Exception | None = None
        self._copies: dict[str, np.ndarray] = {}  # kept from save to save
        self._pending: tuple[Checkpoint, bool] | None = None  # the snapshot, and whether it is best
        self._lock = threading.Lock()  # held while the copies are written, or changed

    def save(self, checkpoint: Checkpoint, best: bool = False) -> Exception | None:
        """Takes a snapshot and saves it in the background -> why the save before has failed.

        Waits for the save before, and tries that once more where it failed. On return the tensors
        and the state may change.
        """
        failure = self.wait()
        with self._lock:
            self._pending = None  # an interrupt may leave the copies half done
            self._pending = copy_into(checkpoint, self._copies), best
        threading.Thread(target=self._work, name="checkpoint").start()
        return failure

    def wait(self) -> Exception | None:
        """Waits until nothing is left to save -> why that failed, or None."""
        self._work()
        return self.failure

    def close(self) -> None:
        """Waits, and raises what the last save failed of."""
        failure = self.wait()
        if failure:
            raise failure

    def _work(self) -> None:
        """Saves the snapshot that is pending, if any: in whichever thread comes first."""
        with self._lock:
            if self._pending is None:
                return
            snapshot, best = self._pending
            try:
                save(self.directory, snapshot, self.keep, best)
            except Exception as error:
                self.failure = error
            else:
                self.failure = self._pending = None


def _folder(directory: str | PathLike[str]) -> Path:
    folder = Path(directory) / CHECKPOINTS
    if folder.is_symlink():
        # Older checkpoints are removed here: they could be those of another run.
        raise InputError(f"{folder} is a symbolic link; put the directory itself there")
    return folder


def _name(step: int) -> str:
    return f"step-{step:08d}.safetensors"


def _steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None
    numbers = [int(match[1]) for match in map(NAME.fullmatch, names) if match]
    return sorted((step for step in numbers if _name(step) in names), reverse=True)


def _files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first and the best one last."""
    names = [_name(step) for step in _steps(folder)]
    return [folder / name for name in [*names, BEST] if os.path.lexists(folder / name)]


def _is_finite(tensor: np.ndarray) -> bool:
    # Both are NaN where one element is. No array of bools, as large as a quarter of the weights.
    return math.isfinite(tensor.min()) and math.isfinite(tensor.max())


def _fault(path: Path) -> str | None:
    try:
        load(path)
    except InputError as error:
        return str(error)
    return None
