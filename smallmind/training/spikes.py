"""Loss spikes: told apart from noise, and undone by restoring the state before them.

A loss is a mean over the learned tokens of an update. Over few of them it may be several times the
average by chance, as when they are rare words, so a single such loss is a spike only if it is far
higher. Weights that are broken stay so: then the losses that follow are high too.
"""

import math
from typing import Any

from smallmind.checks import count_of
from smallmind.training.state import RunState, Snapshot, StateCopy

FACTOR = 3.0  # a loss above this multiple of the moving average is a spike, or noise of few tokens
DECAY = 0.95  # of the moving average
VARIANCE_DECAY, MAX_SQUARE = 0.99, 1e30  # infinity is not JSON
# A mean over n tokens has the deviation of one token's loss over sqrt(n). That of one token is at
# least RELATIVE times the average: tokens of a batch resemble each other, and some are rare.
DEVIATIONS, RELATIVE = 12.0, 3.0
ENOUGH_TOKENS = (DEVIATIONS * RELATIVE / (FACTOR - 1)) ** 2  # from there FACTOR alone decides
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
        self.variance = 0.0  # of the loss of one token, a moving average too
        self.doubtful = 0.0  # learned tokens of recent losses that may be noise or a spike
        self.rollbacks = 0
        self.skipped: list[int] = []  # steps whose batches are skipped
        self.good: Snapshot | None = None
        self._copy = StateCopy()

    def is_spike(self, loss: float, tokens: float) -> bool:
        """Returns True if a loss, the mean over so many learned tokens, is a spike.

        It is not finite, or over 3 times the average so far, and that is no noise: by its spread,
        or because most losses of late were as high, over enough tokens together.
        """
        if not math.isfinite(loss):
            return True
        if self.average is None or not self._is_high(loss):
            return False
        usual = max(self.average, MIN_AVERAGE)
        deviation = max(math.sqrt(self.variance), RELATIVE * usual) / math.sqrt(max(1.0, tokens))
        return loss > usual + DEVIATIONS * deviation or self.doubtful + tokens >= ENOUGH_TOKENS

    def observe(self, loss: float, tokens: float) -> None:
        """Takes the loss of an update into account, the mean over so many learned tokens."""
        if not tokens:
            return
        if self.average is None:
            self.average = loss
            return
        distance = loss - self.average
        square = min(MAX_SQUARE, tokens * distance * distance)
        self.variance = VARIANCE_DECAY * self.variance + (1 - VARIANCE_DECAY) * square
        if self._is_high(loss) and tokens < ENOUGH_TOKENS:
            self.doubtful += tokens
        elif self.doubtful:  # an average that rises with a spike would hide it
            self.doubtful = max(0.0, self.doubtful - tokens)
        else:
            self.average = DECAY * self.average + (1 - DECAY) * loss

    def _is_high(self, loss: float) -> bool:
        return self.average is not None and loss > FACTOR * max(self.average, MIN_AVERAGE)

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
            tried = f" after {count_of(self.rollbacks, 'rollback')}" if self.rollbacks else ""
            raise FloatingPointError(f"the loss {change} at step {step}{tried}")
        self._load_losses(self.good.state["spikes"])
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
        """Returns the state that a resumed run needs, JSON-able."""
        return {
            "average": self.average,
            "variance": self.variance,
            "doubtful": self.doubtful,
            "rollbacks": self.rollbacks,
            "skipped": list(self.skipped),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._load_losses(state)
        self.rollbacks = int(state["rollbacks"])
        self.skipped = [int(step) for step in state["skipped"]]

    def _load_losses(self, state: dict[str, Any]) -> None:
        self.average = state["average"]
        # Earlier versions did not save these.
        self.variance, self.doubtful = state.get("variance", 0.0), state.get("doubtful", 0.0)
