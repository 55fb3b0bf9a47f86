"""Checkpoints: the state of a run in files, from which it resumes bit for bit.

A run's directory holds `checkpoints/step-<step>.safetensors`, the newest few, and
`checkpoints/best.safetensors`.
"""

import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np

from smallmind.checks import InputError, from_json, whole
from smallmind.console import activity
from smallmind.files import durable, safetensors
from smallmind.files.checkpoint_names import BEST, CHECKPOINTS, file_name, saved_steps
from smallmind.nn.loading import CHECKPOINT_FORMAT as FORMAT
from smallmind.nn.loading import WEIGHTS_PREFIX
from smallmind.nn.parameters import as_float32
from smallmind.training.after_save import AfterSave
from smallmind.training.records import Record, SaveRecord
from smallmind.training.state import TOKENIZER, RunState, Snapshot, StateCopy, with_snapshot

SPARE_BYTES = 2**16  # bytes of metadata


def save(
    directory: str | PathLike[str],
    state: RunState,
    keep: int = 3,
    best: bool = False,
    compress: bool = False,
) -> None:
    """Writes a run's checkpoint, if `best` also as the best one, then removes all but `keep`.

    Checkpoints of later steps are removed too: they are left over from before the run resumed at an
    earlier step. OSError if the disk refuses it, FloatingPointError if a tensor has NaN or Inf; the
    existing files then stay.
    """
    if broken := state.first_non_finite():
        raise FloatingPointError(f"{broken} has NaN or Inf: not saved, the last checkpoint stays")
    folder = _folder(directory)
    metadata = _metadata(state)
    tensors: Mapping[str, np.ndarray] = as_float32(state.tensors, WEIGHTS_PREFIX)
    if compress:
        tensors, metadata = safetensors.compressed(tensors, metadata)
    durable.make_directory(folder)
    # The best one first: the state in the other file says that it exists.
    for name in [BEST, file_name(state.step)] if best else [file_name(state.step)]:
        safetensors.write(folder / name, tensors, metadata)
    saved = steps(directory)
    past = [step for step in saved if step <= state.step]
    for step in set(saved) - set(past[: max(1, keep)]):
        durable.remove(folder / file_name(step))


def check_size(state: RunState) -> None:
    """Raises InputError if a run's checkpoints will not fit their format: too many names.

    Counts the snapshot that later states include, and SPARE_BYTES for numbers that grow.
    """
    whole = with_snapshot(state, dataclasses.replace(state, step=state.step - 1))
    try:
        tensors = as_float32(whole.tensors, WEIGHTS_PREFIX)
        safetensors.check(tensors, {**_metadata(whole), "spare": " " * SPARE_BYTES})
    except InputError as error:
        raise InputError(f"this run could not be saved: {error}. Use fewer layers") from None


def load(path: str | PathLike[str]) -> RunState:
    """Reads the state that `save` wrote. InputError if the file is damaged or not a checkpoint."""
    path = Path(path)
    tensors, metadata = safetensors.read(path, strict=True)
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} is not a checkpoint that this version reads ({FORMAT!r})")
    try:
        step, state = whole(from_json(metadata["step"])), _state(metadata)
    except (KeyError, ValueError) as error:
        raise InputError(f"{path} is not a checkpoint of smallmind: {error}") from None
    if path.name not in (file_name(step), BEST):
        raise InputError(f"{path} does not hold the checkpoint that its name promises")
    return RunState(step, tensors, state)


def newest(directory: str | PathLike[str]) -> tuple[RunState | None, list[tuple[Path, str]]]:
    """-> a run's newest sound checkpoint, and the files that were skipped, each with the reason.

    The best one is read only if another was skipped. None if no checkpoint is sound.
    """
    while True:
        found: RunState | None = None
        skipped: list[tuple[Path, str]] = []
        for path in _files(directory):
            if found and (path.name != BEST or not skipped):
                continue
            try:
                state = load(path)
            except InputError as error:
                skipped.append((path, str(error)))
            else:
                found = state if not found or state.step > found.step else found
        # A run that is going may have replaced the files between the listing and the reading.
        if found or all(os.path.lexists(path) for path, _ in skipped):
            return found, skipped


def steps(directory: str | PathLike[str]) -> list[int]:
    """Returns the steps of which a run has a checkpoint, newest first; sound or not."""
    folder = _folder(directory)
    try:
        return saved_steps(folder)
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None


def peek(directory: str | PathLike[str]) -> RunState | None:
    """-> the newest checkpoint without its tensors, fast for any size; None if none can be read.

    Its digest is not checked.
    """
    try:
        saved = steps(directory)
    except InputError:
        return None
    for step in saved:
        with suppress(KeyError, TypeError, ValueError):  # damaged: the one before it
            metadata = safetensors.read_metadata(_folder(directory) / file_name(step))
            return RunState(step, {}, _state(metadata))
    return None


def verify(directory: str | PathLike[str]) -> Iterator[tuple[Path, str | None]]:
    """Yields every checkpoint of a run, newest first and the best last, with its fault or None."""
    for path in _files(directory):
        fault = None
        try:
            load(path)
        except InputError as error:
            fault = str(error)
        yield path, fault


def exist(directory: str | PathLike[str]) -> bool:
    return bool(_files(directory))


def clear_stale(directory: str | PathLike[str]) -> None:
    """Removes partial checkpoints of runs that died. Only for the one process that may save.

    An interrupted run of this process may have left a thread that still writes: waits for it.
    """
    for thread in threading.enumerate():
        if thread.name == _thread_name(directory):
            thread.join()
    with suppress(OSError):
        durable.clear_stale(_folder(directory), 0)


class Saver:
    """Where a run saves its state: here nowhere, while another process saves it."""

    def save(self, state: RunState, best: bool = False) -> Exception | None:
        """Starts saving a state, if `best` also as the best one -> why the last save failed.

        Once this returns, the state may change, unless it is a Snapshot: that must not change
        until `wait` has returned None or another state is saved.
        """
        return None

    def wait(self) -> Exception | None:
        """Waits until no save is running -> why the last one failed, or None."""
        return None

    def news(self, wait: bool = False) -> list[Record]:
        """Returns records of what has come of saves since the last call.

        With `wait` once everything that follows the last save has ended.
        """
        return []


class BackgroundSaver(Saver):
    """Saves checkpoints of the run in `directory` while the run continues.

    `failure` is why the last save failed, or None. The next call tries a failed save again. If the
    program ends during a save, that save finishes first. As a context manager it closes itself.
    With `compress` checkpoints are compressed, which `news` reports. `after_save` runs after each.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        keep: int = 3,
        compress: bool = False,
        after_save: AfterSave | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.keep = keep
        self.compress = compress
        self.after_save = after_save
        self._saved: list[Record] = []  # that nobody has asked for yet
        self.failure: Exception | None = None
        self._copy = StateCopy()  # of states that are not snapshots
        self._pending: tuple[Snapshot, bool] | None = None  # what to save, and whether it is best
        self._lock = threading.Lock()  # held while the pending state is written or replaced
        self._thread: threading.Thread | None = None  # the last one that writes

    def save(self, state: RunState, best: bool = False) -> Exception | None:
        """Waits for the previous save, and tries it once more if it failed. Else as `Saver`."""
        failure = self.wait()
        with self._lock:
            self._pending = None  # an interrupt may leave the copy incomplete
            snapshot = state if isinstance(state, Snapshot) else self._copy.take(state)
            self._pending = snapshot, best
        self._thread = threading.Thread(target=self._write, name=_thread_name(self.directory))
        self._thread.start()
        return failure

    def wait(self) -> Exception | None:
        """Waits for the save that is running, and tries a failed one again -> its failure."""
        self._join()
        self._write()
        return self.failure

    def news(self, wait: bool = False) -> list[Record]:
        if wait:
            self._join()
        if wait and self.after_save:
            self.after_save.wait()
        news = self._saved[:]
        del self._saved[: len(news)]  # the thread may have added one since
        return [*news, *self.after_save.news()] if self.after_save else news

    def close(self) -> None:
        """Waits for the last save, and raises its exception if it failed."""
        if failure := self.wait():
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if error:
                self.wait()
            else:
                self.close()
        finally:
            # Until no thread writes, however often Ctrl-C comes: the program would wait too.
            while self._thread and self._thread.is_alive():
                with suppress(KeyboardInterrupt):
                    self._thread.join()
            if self.after_save and isinstance(error, KeyboardInterrupt):
                self.after_save.end()
            elif self.after_save:
                self.after_save.wait()

    def _join(self) -> None:
        if not (thread := self._thread) or not thread.is_alive():  # perhaps it never started
            return
        thread.join(activity.REFRESH)
        if not thread.is_alive():  # as usual
            return
        with activity.doing("Waiting for a checkpoint to be written"):
            while thread.is_alive():
                thread.join(activity.REFRESH)
                activity.tick()

    def _write(self) -> None:
        """Writes the pending state, if any, in whichever thread comes first."""
        with self._lock:
            if self._pending is None:
                return
            snapshot, best = self._pending
            options = {"compress": True} if self.compress else {}
            begin = activity.clock()
            try:
                save(self.directory, snapshot, self.keep, best, **options)
            except Exception as error:
                self.failure = error
            else:
                self.failure = self._pending = None
                seconds, step = activity.clock() - begin, snapshot.step
                path = _folder(self.directory) / file_name(step)
                if self.compress:
                    nbytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
                    with suppress(OSError):  # somebody has removed it
                        size = path.stat().st_size
                        self._saved.append(SaveRecord(step, size, nbytes, seconds))
                if self.after_save:
                    self.after_save.start(step, path)


def _thread_name(directory: str | PathLike[str]) -> str:
    return f"checkpoint in {Path(directory).resolve()}"


def _folder(directory: str | PathLike[str]) -> Path:
    folder = Path(directory) / CHECKPOINTS
    if folder.is_symlink():
        # Older checkpoints are removed here: they could be another run's.
        raise InputError(f"{folder} is a symbolic link; put the directory itself there")
    return folder


def _metadata(state: RunState) -> dict[str, str]:
    # The tokenizer by itself: it may be as long as a thousand states.
    text = state.state.get(TOKENIZER)
    separate = {TOKENIZER: text} if isinstance(text, str) else {}
    rest = safetensors.to_json({x: y for x, y in state.state.items() if x not in separate})
    return {"format": FORMAT, "step": str(state.step), "state": rest, **separate}


def _state(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The metadata of a state, from any version -> the state."""
    state = safetensors.from_json(metadata["state"])
    if not isinstance(state, dict):
        raise ValueError("its state is not a JSON object")
    if TOKENIZER in metadata:
        return {**state, TOKENIZER: metadata[TOKENIZER]}
    # Earlier versions kept it in the state, and in that of the snapshot once more.
    if isinstance(state.get(TOKENIZER), dict):
        state[TOKENIZER] = safetensors.to_json(state[TOKENIZER])
    with suppress(AttributeError, KeyError, TypeError):  # malformed: `split_snapshot` says so
        state["snapshot"]["state"].pop(TOKENIZER, None)
    return state


def _files(directory: str | PathLike[str]) -> list[Path]:
    """Returns the checkpoints of a run, newest first and the best one last."""
    folder = _folder(directory)
    names = [file_name(step) for step in steps(directory)]
    return [folder / name for name in [*names, BEST] if os.path.lexists(folder / name)]
