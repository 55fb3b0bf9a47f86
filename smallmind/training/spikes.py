"""Loss spikes: told apart from noise, and undone by restoring the state before them."""

import math
from typing import Any

from smallmind.training.state import RunState, Snapshot, StateCopy

FACTOR = 3.0  # a loss above this multiple of the moving average is a spike
DECAY = 0.95  # of the moving average
# Nats per token. A model that has memorised its text has a hundredth of this, and a surprising
# batch many times that average: noise, not a spike.
MIN_AVERAGE = 0.1


class Spikes:
    """Detects loss spikes, and keeps the last good state of a run to restore.

    A run may be rolled back `max_rollbacks` times; each time halves the learning rate again. With 0
    no state is kept.
    """

    def __init__(self, max_rollbacks: int) -> None:
        self.max_rollbacks = max_rollbacks
        self.average: float | None = None  # exponential moving average of the losses so far
        self.rollbacks = 0
        self.skipped: list[int] = []  # steps whose batches are skipped
        self.good: Snapshot | None = None
        self._copy = StateCopy()

    def is_spike(self, loss: float) -> bool:
        """True if a loss, in nats per token, is not finite or over 3 times the average so far."""
        if not math.isfinite(loss):
            return True
        return self.average is not None and loss > FACTOR * max(self.average, MIN_AVERAGE)

    def observe(self, loss: float) -> None:
        self.average = loss if self.average is None else DECAY * self.average + (1 - DECAY) * loss

    def keep(self, state: RunState, overwrite: bool = True) -> str | None:
        """Copies a state to return to; if `overwrite`, into the arrays of the previous one.

        A state that is not finite is not kept -> the name of its first such tensor, or None.
        """
        if not self.max_rollbacks:
            return None
        if broken := state.first_non_finite():
            return broken
        self.good = None  # an interrupt may leave the copy incomplete
        self.good = self._copy.take(state, overwrite)
        return None

    def roll_back(self, step: int, loss: float, is_last: bool) -> Snapshot:
        """Counts a rollback because of the loss of a step -> the state to restore.

        FloatingPointError with the reason if no state or rollback is left, or no later step that
        could show whether it helped.
        """
        is_finite = math.isfinite(loss)
        spent = self.rollbacks >= self.max_rollbacks
        if self.good is None or spent or (is_last and not is_finite):
            change = (
                f"rose to {loss:.4g}, from {self.average:.4g}," if is_finite else f"became {loss}"
            )
            plural = "s" if self.rollbacks > 1 else ""
            tried = f" after {self.rollbacks} rollback{plural}" if self.rollbacks else ""
            raise FloatingPointError(f"the loss {change} at step {step}{tried}")
        self.average = self.good.state["spikes"]["average"]
        self.rollbacks += 1
        self.skipped.append(step)
        return self.good

    @property
    def held_bytes(self) -> int:
        return self._copy.nbytes

    @property
    def lr_factor(self) -> float:
        """The factor of the learning rate after the rollbacks so far."""
        return 0.5**self.rollbacks

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs, JSON-able."""
        skipped = list(self.skipped)
        return {"average": self.average, "rollbacks": self.rollbacks, "skipped": skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        self.average, self.rollbacks = state["average"], int(state["rollbacks"])
        self.skipped = [int(step) for step in state["skipped"]]
