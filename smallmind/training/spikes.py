"""Spikes of the loss: told from noise, and undone by going back to the state before them."""

import math
from typing import Any

import numpy as np

from smallmind.config import InputError
from smallmind.training.checkpoint import Checkpoint, copy_into

FACTOR = 3.0  # times the moving average, above which a loss is a spike
MEMORY = 0.95  # share of the average that stays when a loss comes in
# Nats a token. A model that knows its text by heart is at a hundredth of it, and a batch with one
# surprise at many times that, which is noise and no run that breaks.
LEAST_AVERAGE = 0.1
SNAPSHOT_EVERY = 100  # steps
PREFIX = "snapshot."  # of its tensors in a checkpoint


class Spikes:
    """What a run knows of its losses, and the last good state to go back to, held in memory.

    `most` rollbacks are made in a run, each of which halves the learning rate once more; with 0
    nothing is held.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.average: float | None = None  # of the losses so far, exponentially weighted
        self.rollbacks = 0
        self.skipped: list[int] = []  # steps whose batches are left out
        self.good: Checkpoint | None = None
        self._copies: dict[str, np.ndarray] = {}

    def is_spike(self, loss: float) -> bool:
        """Whether loss, in nats a token, is not finite or over 3 times the average before it."""
        if not math.isfinite(loss):
            return True
        return self.average is not None and loss > FACTOR * max(self.average, LEAST_AVERAGE)

    def observe(self, loss: float) -> None:
        """Told the loss of each update."""
        self.average = loss if self.average is None else MEMORY * self.average + (1 - MEMORY) * loss

    def keep(self, checkpoint: Checkpoint) -> str | None:
        """Takes a copy of a state to go back to, in the place of the one before.

        Unless it is not finite: then that one stays, and the name of the first such tensor returns.
        """
        if not self.most:
            return None
        for name, tensor in checkpoint.tensors.items():
            if not name.startswith(PREFIX) and not np.isfinite(tensor).all():
                return name
        self.good = copy_into(without_snapshot(checkpoint)[0], self._copies)
        return None

    def with_snapshot(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint to which the snapshot is added, where that is of another step.

        A run that was ended between two snapshots goes on with the one that it had.
        """
        good = self.good
        if good is None or good.step == checkpoint.step:
            return checkpoint
        tensors = {PREFIX + name: value for name, value in good.tensors.items()}
        state = {**checkpoint.state, "snapshot": {"step": good.step, "state": good.state}}
        return Checkpoint(checkpoint.step, {**checkpoint.tensors, **tensors}, state)

    def go_back(self, step: int, loss: float, is_last: bool) -> Checkpoint:
        """The loss of a step spiked -> the state to go back to; the rollback counts.

        FloatingPointError with the reason where there is no state or no rollback left, or no later
        step that could show whether it helped.
        """
        finite = math.isfinite(loss)
        if self.good is None or self.rollbacks >= self.most or (is_last and not finite):
            what = f"rose to {loss:.4g}, from {self.average:.4g}," if finite else f"became {loss}"
            times = f"{self.rollbacks} rollback{'s' if self.rollbacks > 1 else ''}"
            tried = f" after {times}" if self.rollbacks else ""
            raise FloatingPointError(f"the loss {what} at step {step}{tried}")
        self.average = self.good.state["spikes"]["average"]
        self.rollbacks += 1
        self.skipped.append(step)
        return self.good

    @property
    def held_bytes(self) -> int:
        """What the copy takes."""
        return sum(copy.nbytes for copy in self._copies.values())

    @property
    def lr_factor(self) -> float:
        return 0.5**self.rollbacks

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from, fit for JSON."""
        skipped = list(self.skipped)
        return {"average": self.average, "rollbacks": self.rollbacks, "skipped": skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what state() gave."""
        self.average, self.rollbacks = state["average"], int(state["rollbacks"])
        self.skipped = [int(step) for step in state["skipped"]]


def without_snapshot(checkpoint: Checkpoint) -> tuple[Checkpoint, Checkpoint | None]:
    """A checkpoint as it was before `with_snapshot`, and what that added or None.

    InputError where it is not one of ours.
    """
    state = {key: value for key, value in checkpoint.state.items() if key != "snapshot"}
    now: dict[str, np.ndarray] = {}
    kept: dict[str, np.ndarray] = {}
    for name, value in checkpoint.tensors.items():
        (kept if name.startswith(PREFIX) else now)[name.removeprefix(PREFIX)] = value
    snapshot: Any = checkpoint.state.get("snapshot")
    good = None
    if snapshot or kept:
        try:
            good = Checkpoint(int(snapshot["step"]), kept, dict(snapshot["state"]))
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"the checkpoint of step {checkpoint.step} has a snapshot that is none"
            ) from None
    return Checkpoint(checkpoint.step, now, state), good
