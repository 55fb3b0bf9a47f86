"""A run with a target loss: when it looks at its held-out loss, and what it finds.

The target is for the loss on the whole held-out text, which is reported at the end. A look takes
some windows from all over it: few while the run is far from the target, half of what looks may
still cost once it is close. Between looks the held-out loss is expected to fall by as much as the
training loss. Looks and expectations are combined by their variances, as in a Kalman filter.

Costs are counted in batches, not in seconds: when a run looks and where it ends depend on its state
alone, not on the machine or the number of threads and processes.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from smallmind.settings.config import TrainingConfig
from smallmind.text.dataset import Dataset
from smallmind.training.evaluation import MAX_HELD_OUT, count_overlapping
from smallmind.training.records import LookRecord, RunProgress, TargetRecord
from smallmind.training.spikes import DECAY

LOOK_SHARE = 0.1  # share of the time of a run, its final evaluation included, at most
PER_PASS = 3  # batches of an evaluation that cost as much as a training pass of one
LOOK_TOKENS = 2048  # that a look predicts far from the target
SPREAD = 2.0  # variance of the loss of a token, over its mean, in nats: measured on two texts
DRIFT = 0.6  # standard deviation of what training and held-out loss fall by, over its mean
# Shares of the target: the first look comes when a loss is above it by at most FIRST_LOOK_SHARE.
FIRST_LOOK_SHARE, CLOSE_SHARE = 0.5, 0.04
LOOK_DEVIATIONS = 1.0  # standard deviations above the target at which the next look comes
EARLIEST, LATEST = 1.02, 1.4  # steps from the start to a look, as a multiple of those to the last
# As many batches of windows from all over the held-out text -> the loss; None if it was stopped.
HeldOutLoss = Callable[[int], float | None]


class Estimate(NamedTuple):
    """The loss on the whole held-out text, and the variance of what is known of it."""

    loss: float
    variance: float

    def combined(self, other: "Estimate") -> "Estimate":
        """Combines both, each weighted by the uncertainty of the other."""
        total = self.variance + other.variance
        share = self.variance / total if total else 1.0
        return Estimate(self.loss + share * (other.loss - self.loss), share * other.variance)


class Target(NamedTuple):
    """The looks of a run: `config.target_loss` is set."""

    config: TrainingConfig
    data: Dataset
    progress: RunProgress
    training_loss: float | None  # smoothed

    @property
    def affordable(self) -> int:
        """The number of batches that looks may take by now, if the run ends here."""
        trained = PER_PASS * self.progress.step * self.config.grad_accum_steps
        others = trained + self._all_batches
        return int(LOOK_SHARE / (1 - LOOK_SHARE) * others) - self.progress.look_batches

    @property
    def batches(self) -> int:
        target, expected = self.config.target_loss, self.expected
        few = min(math.ceil(LOOK_TOKENS / self._tokens(2)), self._all_batches)
        if target is None or expected is None or expected.loss > (1 + CLOSE_SHARE) * target:
            return few
        return max(few, min(self.affordable // 2, self._all_batches))

    @property
    def expected(self) -> Estimate | None:
        """The held-out loss by now, after what the training loss has fallen by; None: no look."""
        progress, now = self.progress, self.training_loss
        loss, then = progress.look_loss, progress.look_training_loss
        if loss is None or then is None or now is None:
            return None
        # Both training losses are means over about as many updates as their decay lets count.
        updates = (1 + DECAY) / (1 - DECAY)
        tokens = updates * self._tokens(1) * self.config.grad_accum_steps
        noise = 2 * SPREAD * max(0.0, now) / tokens
        drift = (DRIFT * (then - now)) ** 2
        return Estimate(loss - (then - now), progress.look_variance + noise + drift)

    def is_due(self) -> bool:
        """Returns True if a look is due after the step that the run has reached."""
        target, progress, now = self.config.target_loss, self.progress, self.training_loss
        is_over = progress.ended or progress.step >= self.config.steps
        if target is None or now is None or is_over or progress.step <= EARLIEST * progress.looked:
            return False
        if expected := self.expected:
            is_near = expected.loss <= target + LOOK_DEVIATIONS * math.sqrt(expected.variance)
            is_near = is_near or progress.step >= LATEST * progress.looked
        else:
            lowest = now if progress.best_loss is None else min(now, progress.best_loss)
            is_near = lowest <= (1 + FIRST_LOOK_SHARE) * target
        return is_near and self.batches <= self.affordable

    def look(self, held_out_loss: HeldOutLoss) -> LookRecord | TargetRecord | None:
        """Looks, and counts that in the progress -> a TargetRecord if the run has reached it.

        None if it was stopped; the progress is then as it was.
        """
        target, progress, batches = self.config.target_loss, self.progress, self.batches
        assert target is not None
        if (loss := held_out_loss(batches)) is None:
            return None
        unseen = 1 - batches / self._all_batches
        found = Estimate(loss, SPREAD * loss / (batches * self._tokens(2)) * unseen)
        if expected := self.expected:
            found = expected.combined(found)
        progress.look_loss, progress.look_variance = found
        progress.look_training_loss = self.training_loss
        progress.look_batches += batches
        progress.looks += 1
        progress.first_look = progress.first_look or progress.step
        progress.looked = progress.step
        if found.loss > target:
            return LookRecord(progress.step, found.loss)
        progress.ended = True
        # It is the best so far, and saved as such.
        progress.evaluated = progress.best_step = progress.step
        progress.best_loss = found.loss
        return TargetRecord(progress.step, found.loss, target)

    def _tokens(self, overlap: int) -> float:
        """Counts the tokens that a batch predicts if each token is in `overlap` windows."""
        return self.data.batch_size * self.data.block_size / overlap

    @property
    def _all_batches(self) -> int:
        """The number of batches of the evaluation at the end."""
        n, T = len(self.data.held_out) - 1, self.data.block_size
        return math.ceil(count_overlapping(n, T, MAX_HELD_OUT) / self.data.batch_size)
