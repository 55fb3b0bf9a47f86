"""A run with a target loss: when it looks at its held-out loss, and what it finds.

The target is for the loss on the whole held-out text, which is reported at the end. A look takes a
few windows from all over it. Their loss differs from that of the whole by an amount that changes
little in hundreds of steps, so a run measures it once it is close, on as many windows as the looks
may cost.

That is counted in batches, not in seconds: when a run looks and where it ends depend on its state
alone, not on the machine or the number of threads and ranks.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from smallmind.config import TrainingConfig
from smallmind.text.dataset import Dataset
from smallmind.training.evaluation import MOST_HELD_OUT, count_overlapping
from smallmind.training.records import LookRecord, RunProgress, TargetRecord

LOOKING = 0.1  # share of the time of a run, its final evaluation included, at most
PER_PASS = 3  # batches of an evaluation that cost as much as a training pass of one
TOKENS = 4096  # of a look: enough to follow a loss to 0.01 nats or so
RESERVED = 2  # looks that stay affordable when the loss is measured precisely
# Shares of the target. A run looks first when its training loss is above it by at most this, and
# then whenever the held-out loss may be near; it is measured precisely once it is close.
FIRST, NEAR, CLOSE = 0.35, 0.04, 0.05
EARLIEST, LATEST = 1.015, 1.1  # steps from the start to a look, as a multiple of those to the last
# As many batches of windows from all over the held-out text -> the loss; None if it was stopped.
HeldOutLoss = Callable[[int], float | None]


class Target(NamedTuple):
    """The looks of a run: `config.target_loss` is set."""

    config: TrainingConfig
    data: Dataset
    progress: RunProgress
    training_loss: float | None  # smoothed

    @property
    def batches(self) -> int:
        """How many a look takes."""
        return min(math.ceil(TOKENS / (self.data.batch_size * self.data.block_size)), self._least)

    @property
    def affordable(self) -> int:
        """How many batches looks may take by now, if the run ends here."""
        trained = PER_PASS * self.progress.step * self.config.grad_accum_steps
        others = trained + self._all_batches
        return int(LOOKING / (1 - LOOKING) * others) - self.progress.look_batches

    def is_due(self) -> bool:
        """Whether to look after the step that the run has reached.

        The held-out loss is expected to fall by as much as the training loss.
        """
        target, progress, now = self.config.target_loss, self.progress, self.training_loss
        is_over = progress.ended or progress.step >= self.config.steps
        if target is None or now is None or is_over:
            return False
        if progress.step <= EARLIEST * progress.looked:
            return False
        if progress.look_loss is None or progress.look_training_loss is None:
            lowest = min(now, math.inf if progress.best_loss is None else progress.best_loss)
            return lowest <= (1 + FIRST) * target and self.affordable >= self.batches
        expected = progress.look_loss - (progress.look_training_loss - now)
        is_near = expected <= (1 + NEAR) * target or 0 < LATEST * progress.looked <= progress.step
        return is_near and self.affordable >= self._needed

    def look(self, held_out_loss: HeldOutLoss) -> LookRecord | TargetRecord | None:
        """Looks, and counts that in the progress -> a TargetRecord if the run has reached it.

        None if it was stopped; the progress is then as it was.
        """
        target, progress = self.config.target_loss, self.progress
        assert target is not None
        loss, taken = held_out_loss(self.batches), self.batches
        if loss is None:
            return None
        offset, precision = progress.look_offset, progress.look_precision
        if loss + (offset or 0.0) <= (1 + CLOSE if offset is None else 1.0) * target:
            batches = self.affordable - (1 + RESERVED) * taken
            batches = min(batches, self._all_batches)
            if batches >= self._least and precision < self._all_batches:
                precise = held_out_loss(batches)
                if precise is None:
                    return None
                # Each number of batches has other windows: their mean is closer than the last.
                known = 0 if batches == self._all_batches else precision
                offset = (known * (offset or 0.0) + batches * (precise - loss)) / (known + batches)
                precision, taken = known + batches, taken + batches
        progress.look_offset, progress.look_precision = offset, precision
        progress.look_batches += taken
        progress.looks += 1
        progress.first_look = progress.first_look or progress.step
        progress.looked = progress.step
        progress.look_loss = loss + (offset or 0.0)
        progress.look_training_loss = self.training_loss
        if offset is None or progress.look_loss > target:
            return LookRecord(progress.step, progress.look_loss)
        progress.ended = True
        # It is the best so far, and saved as such.
        progress.evaluated = progress.best_step = progress.step
        progress.best_loss = progress.look_loss
        return TargetRecord(progress.step, progress.look_loss, target)

    @property
    def _needed(self) -> int:
        """How many batches a look needs: more where it is to be precise."""
        progress, target = self.progress, self.config.target_loss or 0.0
        is_close = progress.look_loss is not None and progress.look_loss <= (1 + CLOSE) * target
        if progress.look_offset is None and is_close:
            return (1 + RESERVED) * self.batches + self._least
        return self.batches

    @property
    def _least(self) -> int:
        """As many batches as the usual evaluation takes: less is not precise."""
        return min(self.config.val_batches or self.data.held_out_batches, self._all_batches)

    @property
    def _all_batches(self) -> int:
        """How many batches the evaluation at the end takes."""
        n, T = len(self.data.held_out) - 1, self.data.block_size
        return math.ceil(count_overlapping(n, T, MOST_HELD_OUT) / self.data.batch_size)
