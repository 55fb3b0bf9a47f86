"""How the learning rate changes over a run."""

import math

from smallmind.config import TrainingConfig


def learning_rate(step: int, config: TrainingConfig) -> float:
    """step (from 0) -> its learning rate: linear warmup, then a cosine from the peak to min_lr.

    Loshchilov & Hutter (2017), without restarts.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if step >= config.steps:
        return config.min_lr
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + cosine * (config.learning_rate - config.min_lr)
