"""Checks that the checkpoints of a run are sound, and follow from each other. Writes nothing."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.files import safetensors
from smallmind.files.checkpoint_names import NAME
from smallmind.runs.directory import fault_of
from smallmind.runs.files import MODEL
from smallmind.settings.config import TrainingConfig
from smallmind.training.checkpoint import load, verify
from smallmind.training.progress import OnRecord
from smallmind.training.records import Record
from smallmind.training.state import RunState, reopened
from smallmind.training.training import Training


@dataclass(frozen=True)
class Verdict:
    """The name of what was checked, and one line that says what is wrong with it, or None."""

    name: str
    fault: str | None


def verify_run(
    directory: Path,
    files: Mapping[str, Sequence[str]],
    training: Training | None,
    config: TrainingConfig,
    on_record: OnRecord | None,
    is_imported: bool = False,
) -> list[Verdict]:
    """-> a Verdict on every checkpoint of a run, newest first, then on each pair of neighbours.

    Before them, one on each of `files`, which must have one of these SHA-256.

    With a training, which must be the run's own like config, the run is retrained from each sound
    checkpoint to the next one and must reproduce its hashes. `on_record` gets each Verdict at once,
    and the records of these steps. InputError if there is no checkpoint, unless the
    run was imported.
    """
    verdicts, sound = [], []

    def found(finding: Record | Verdict) -> None:
        if isinstance(finding, Verdict):
            verdicts.append(finding)
        if on_record:
            on_record(finding)

    for name, digests in files.items():
        found(Verdict(name, _fault_of(directory / name, digests)))
    for path, fault in verify(directory):
        found(Verdict(path.name, fault))
        if not fault:
            sound.append(path)
    for finding in _retrain(training, config, sound) if training else ():
        found(finding)
    if len(verdicts) == len(files) and not is_imported:
        raise InputError(f"{directory} has no checkpoint yet; resume the run first")
    return verdicts


def _fault_of(path: Path, digests: Sequence[str]) -> str | None:
    """Finds faults as `fault_of`, but reads all of a model, whose digest is a part of it."""
    fault = fault_of(path, digests)
    if not fault and path.name == MODEL:
        try:
            safetensors.open_tensors(path)
        except InputError as error:
            return str(error)
    return fault


def fingerprint(state: RunState, saved: RunState | None = None) -> dict[str, str]:
    """Computes the SHA-256 of every tensor and part of the state but times, that `saved` has."""
    parts = {
        name: hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()
        for name, tensor in state.tensors.items()
    }
    for name, part in state.state.items():
        part = _compared(part, saved.state.get(name) if saved else part)
        parts[name] = hashlib.sha256(safetensors.to_json(part).encode()).hexdigest()
    return parts


def _compared(part: Any, saved: Any) -> Any:
    """Returns a part of the state without times, and without the keys that `saved` lacks."""
    if not (isinstance(part, dict) and isinstance(saved, dict)):
        return part
    names = [key for key in part if key in saved and not key.endswith("seconds")]
    return {name: _compared(part[name], saved[name]) for name in names}


def _retrain(
    training: Training, config: TrainingConfig, paths: list[Path]
) -> Iterator[Record | Verdict]:
    by_step = {_step(path): path for path in reversed(paths)}
    for first, second in pairwise(sorted(by_step)):
        try:
            # A run that was made longer has followed the schedule of its length at that time.
            target = load(by_step[second])
            config = _with_length_of(config, target)
            del target
            yield from training.steps(config, reopened(load(by_step[first])), until=second)
            saved = load(by_step[second])
            trained = fingerprint(training.state(), saved)
            # A run interrupted during an evaluation starts with that evaluation when it resumes.
            yield from training.steps(config, saved, until=second)
            fault = _difference(trained, fingerprint(training.state(), saved))
            cpu = saved.state.get("instruction_set")
            if fault and isinstance(cpu, str) and cpu != training.model.instruction_set:
                fault = (
                    f"the checkpoint was saved with {cpu}, and this CPU computes with "
                    f"{training.model.instruction_set}: verify it on a CPU like the first"
                )
        except (InputError, FloatingPointError) as error:
            fault = str(error)
        yield Verdict(f"retrained from step {first} to {second}", fault)


def _with_length_of(config: TrainingConfig, state: RunState) -> TrainingConfig:
    """-> the config with the number of steps, and of epochs, that a checkpoint was saved with."""
    saved = state.state.get("config")
    if not isinstance(saved, dict):
        return config  # that of another run: resuming says so
    lengths = {name: saved[name] for name in ("steps", "lengths", "epochs") if name in saved}
    return dataclasses.replace(config, **({"lengths": None} | lengths))


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else load(path).step


def _difference(trained: dict[str, str], saved: dict[str, str]) -> str | None:
    names = [name for name in {**saved, **trained} if saved.get(name) != trained.get(name)]
    if not names:
        return None
    return (
        f"{len(names)} of {len(saved)} hashes differ, the first is {names[0]}: a checkpoint was "
        "changed, or was written by another version or kind of CPU"
    )
