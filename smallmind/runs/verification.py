"""Whether the checkpoints of a run are what it went through. Nothing is written."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path

import numpy as np

from smallmind import safetensors
from smallmind.config import InputError, TrainingConfig
from smallmind.training.checkpoint import NAME, load, verify
from smallmind.training.loop import Training
from smallmind.training.records import Record
from smallmind.training.state import RunState


@dataclass(frozen=True)
class Verdict:
    """What was looked at, and a line about what is wrong with it; None where nothing is."""

    name: str
    fault: str | None


def verification(
    directory: str | PathLike[str],
    training: Training | None = None,
    config: TrainingConfig | None = None,
) -> Iterator[Record | Verdict]:
    """A Verdict on every checkpoint of a run, newest first, and on each stretch between two.

    With training and config, which are those of the run, it is trained again from each sound
    checkpoint to the next one, whose hashes must come out; the records on the way are yielded too.
    """
    sound = []
    for path, fault in verify(directory):
        yield Verdict(path.name, fault)
        if not fault:
            sound.append(path)
    if training and config:
        yield from _replay(training, config, sound)


def fingerprint(checkpoint: RunState) -> dict[str, str]:
    """SHA-256 of every tensor and of every part of the state, without what the clock says."""
    parts = {
        name: hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()
        for name, tensor in checkpoint.tensors.items()
    }
    for name, part in checkpoint.state.items():
        if isinstance(part, dict):
            part = {key: value for key, value in part.items() if not key.endswith("seconds")}
        parts[name] = hashlib.sha256(safetensors.to_json(part).encode()).hexdigest()
    return parts


def _replay(
    training: Training, config: TrainingConfig, paths: list[Path]
) -> Iterator[Record | Verdict]:
    by_step = {_step(path): path for path in reversed(paths)}
    for first, second in pairwise(sorted(by_step)):
        try:
            yield from training.steps(config, load(by_step[first]), until=second)
            trained = fingerprint(training.state())
            # Where a run was broken off in an evaluation, that comes first when it goes on.
            yield from training.steps(config, load(by_step[second]), until=second)
            fault = _difference(trained, fingerprint(training.state()))
        except (InputError, FloatingPointError) as error:
            fault = str(error)
        yield Verdict(f"trained again from step {first} to {second}", fault)


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else load(path).step


def _difference(trained: dict[str, str], saved: dict[str, str]) -> str | None:
    names = [name for name in {**saved, **trained} if saved.get(name) != trained.get(name)]
    if not names:
        return None
    return (
        f"{len(names)} of {len(saved)} hashes differ, first that of {names[0]}: a checkpoint was "
        "changed, or comes from another version or kind of CPU"
    )
