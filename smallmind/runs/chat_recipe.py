"""Evaluations of held-out answers, as often as a share of the time of a run allows."""

import dataclasses
import math

from smallmind.forecast import pace
from smallmind.settings.config import TrainingConfig
from smallmind.settings.rules import EVALUATIONS
from smallmind.training.answers import MIN_QUESTIONS
from smallmind.training.evaluation import EVALUATION_SHARE, SAMPLE_TOKENS, evaluating_seconds
from smallmind.training.training import Training

FEWEST_TOKENS = 4096  # in windows of an evaluation, which is more often rather than on more
ASKING = 0.2  # share of the time for evaluations that questions before the first step may take


def evaluated_in_time(
    training: Training, config: TrainingConfig, seconds: float | None = None
) -> tuple[TrainingConfig, float]:
    """Returns the config with as many evaluations as fit in their share of the time of its steps.

    With seconds, of a run that takes so long. -> the config, and the seconds for questions before
    the first step, perhaps 0. Times a few passes.
    """
    data = training.data
    timed = pace.kept_pace(training, dataclasses.replace(config, val_every=1, val_batches=1))
    steps = config.steps
    if seconds is not None:
        steps = max(1, int((1 - EVALUATION_SHARE) * seconds / timed.step))
    seconds, batch = evaluating_seconds(steps * timed.step), timed.evaluation / 2
    asking = MIN_QUESTIONS * timed.sample * pace.TIMED_TOKENS / SAMPLE_TOKENS
    seconds -= pace.batches_at_the_end(data) * batch + asking
    before = asking if asking < ASKING * seconds else 0.0
    seconds -= before

    def cost(batches: int) -> float:
        return batch * sum(min(batches, data.batches_of(part)) for part in ("train", "held_out"))

    few = math.ceil(FEWEST_TOKENS / (data.batch_size * data.block_size))
    count = max(1, min(EVALUATIONS, int(seconds / max(cost(few), 1e-9))))
    fitting = [n for n in range(1, config.val_batches + 1) if count * cost(n) <= seconds]
    batches, every = max(fitting, default=1), math.ceil(steps / count)
    if not fitting and config.schedule != "plateau" and config.target_loss is None:
        every = 0  # the evaluation at the end takes all the time there is
    return dataclasses.replace(config, val_every=every, val_batches=batches), before
