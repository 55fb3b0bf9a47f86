"""The state of a run as one value that is copied, saved and restored as a whole."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.files import safetensors

TOKENIZER = "tokenizer"  # the part of a state that is long and never changes: a text
SNAPSHOT = "snapshot."  # prefix of a snapshot's tensors inside the state that includes it


@dataclass(frozen=True)
class RunState:
    """A run after `step` updates: tensors by name, and everything else as JSON-able `state`.

    Numbers in `state` survive JSON bit for bit; tuples become lists. NaN and infinities are not
    JSON: None means not known yet.
    """

    step: int
    tensors: Mapping[str, np.ndarray]
    state: dict[str, Any]

    def first_non_finite(self) -> str | None:
        """Returns the name of the first tensor with NaN or Inf, or None."""
        for name, tensor in self.tensors.items():
            if tensor.dtype.kind == "f" and tensor.size and not _is_finite(tensor):
                return name
        return None


@dataclass(frozen=True)
class Snapshot(RunState):
    """A state that does not change until a saver has written it, so it need not be copied."""


class StateCopy:
    """One private copy of a run's state, whose arrays each new copy reuses."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def take(self, state: RunState, overwrite: bool = True) -> Snapshot:
        """Copies a state; if `overwrite`, into the arrays of the previous copy."""
        if not overwrite:
            self._arrays = {}
        arrays = self._arrays
        for name in arrays.keys() - state.tensors.keys():
            del arrays[name]
        for name, tensor in state.tensors.items():
            if not tensor.flags.writeable:  # frozen: it never changes
                arrays[name] = tensor
                continue
            array = arrays.get(name)
            kind = tensor.shape, tensor.dtype, True
            if array is None or (array.shape, array.dtype, array.flags.writeable) != kind:
                array = arrays[name] = np.empty(tensor.shape, tensor.dtype)
            np.copyto(array, tensor)
        return Snapshot(state.step, arrays, safetensors.from_json(safetensors.to_json(state.state)))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values() if array.flags.writeable)


def reopened(state: RunState) -> RunState:
    """Returns the state of a run that early stopping has ended, as if it had not: it waits anew."""
    progress = state.state.get("progress")
    if not isinstance(progress, dict) or not progress.get("ended"):
        return state
    progress = {**progress, "ended": False, "waited": 0}
    return RunState(state.step, state.tensors, {**state.state, "progress": progress})


def with_snapshot(state: RunState, snapshot: RunState | None) -> RunState:
    """-> a state that includes the snapshot of an earlier step, so that a resumed run has it too.

    A snapshot of the same step adds nothing and is left out, and so are its tokenizer and tensors
    that both have: frozen weights.
    """
    if snapshot is None or snapshot.step == state.step:
        return state
    shared = [x for x, tensor in snapshot.tensors.items() if tensor is state.tensors.get(x)]
    own = snapshot.tensors.keys() - set(shared)
    tensors = {SNAPSHOT + x: y for x, y in snapshot.tensors.items() if x in own}
    rest = {name: part for name, part in snapshot.state.items() if name != TOKENIZER}
    included = {"step": snapshot.step, "state": rest, **({"shared": shared} if shared else {})}
    return RunState(state.step, {**state.tensors, **tensors}, {**state.state, "snapshot": included})


def split_snapshot(state: RunState) -> tuple[RunState, RunState | None]:
    """Undoes `with_snapshot` -> the state alone, and the snapshot or None.

    InputError if the snapshot is malformed.
    """
    current: dict[str, np.ndarray] = {}
    earlier: dict[str, np.ndarray] = {}
    for name, tensor in state.tensors.items():
        (earlier if name.startswith(SNAPSHOT) else current)[name.removeprefix(SNAPSHOT)] = tensor
    rest = {key: value for key, value in state.state.items() if key != "snapshot"}
    included: Any = state.state.get("snapshot")
    snapshot = None
    if included or earlier:
        try:
            earlier |= {name: current[name] for name in included.get("shared", ())}
            snapshot = RunState(int(included["step"]), earlier, dict(included["state"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InputError(
                f"the checkpoint of step {state.step} has a malformed snapshot"
            ) from None
    return RunState(state.step, current, rest), snapshot


def _is_finite(tensor: np.ndarray) -> bool:
    # Minimum and maximum are NaN if any element is. Unlike np.isfinite, no array of bools.
    return math.isfinite(tensor.min()) and math.isfinite(tensor.max())
