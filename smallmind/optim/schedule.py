"""Learning rates over a run: one class per schedule, built by `schedule`."""

import math
from typing import Any

from smallmind import parts
from smallmind.checks import count_of
from smallmind.settings.config import TrainingConfig

ONE_CYCLE_START = 1 / 25  # of the peak
WARMUP_SHARE = 10  # a warmup of a tenth of the steps suits most runs
IMPROVEMENT = 1e-4  # share by which a loss must be below the best to count as lower


def schedule(config: TrainingConfig) -> "Schedule":
    """Returns the schedule named by config, as it is before the first step."""
    return parts.load(parts.SCHEDULES, config.schedule)(config)


def too_short(config: TrainingConfig, has_begun: bool = False) -> str | None:
    """-> why a run with this config ends before it learns at full rate, and what to do; else None.

    Of a run that has begun only the number of steps can be changed.
    """
    if not config.steps:
        return "steps=0 trains nothing: the model stays as it is initialised"
    planned = schedule(config)
    if config.steps > planned.warmup:
        return None
    shorter = "" if has_begun else f"--warmup-steps {config.steps // WARMUP_SHARE}, or "
    return (
        f"The run ends during its warmup of {count_of(planned.warmup, 'step')}, at a learning rate "
        f"of {planned.lr(config.steps - 1):.1e} instead of {planned.peak:.1e}: use {shorter}more "
        "--steps"
    )


class Schedule:
    """The learning rate of each step: linear warmup (Goyal et al. 2017), then `after_warmup`.

    A run that is no longer than its warmup never reaches the peak. If the length of a run was
    chosen again while it trained, it follows the schedule of its first length, faster or slower
    from then on, and ends where that ends.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.peak, self.min_lr = config.learning_rate, config.resolved_min_lr
        self.fitted = config.fitted
        self.warmup = config.warmup_steps
        self.steps = self.fitted[0][1] if self.fitted else config.steps

    def lr(self, step: int) -> float:
        """step (from 0) -> the learning rate of its update."""
        at = self.position(step)
        return self.during_warmup(at) if at < self.warmup else self.after_warmup(at)

    def position(self, step: int) -> float:
        """step -> the step of the first length at which as large a share of the run has passed."""
        position, begin, end = 0.0, 0, self.steps
        for start, steps in self.fitted[1:]:
            if start >= step:
                break
            position += (self.steps - position) * progress(start, begin, end)
            begin, end = start, steps
        if not begin:
            return step
        return position + (self.steps - position) * progress(step, begin, end)

    def during_warmup(self, step: float) -> float:
        """Rises evenly from above 0: step `warmup` is the first at the peak."""
        return self.peak * (step + 1) / (self.warmup + 1)

    def after_warmup(self, step: float) -> float:
        """step -> its learning rate, after the warmup."""
        raise NotImplementedError

    def observe(self, val_loss: float) -> None:
        """Takes the held-out loss of each evaluation into account, in nats per token."""

    def state(self) -> dict[str, Any]:
        """-> the state that a resumed run needs, JSON-able: all that `observe` has changed."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what state() returned."""

    def interpolate(self, height: float) -> float:
        """0 -> min_lr, 1 -> the peak."""
        return self.min_lr + height * (self.peak - self.min_lr)

    def reduce(self, factor: float, times: int) -> float:
        """Returns the peak times factor ** times; never below min_lr."""
        return max(self.min_lr, self.peak * factor**times)


def progress(step: float, start: float, end: float) -> float:
    """Returns the share of the way from start to end: 0 up to start, 1 from end on."""
    if step >= end:
        return 1.0
    return (step - start) / (end - start) if step > start else 0.0


def half_cosine(share: float) -> float:
    """Falls from 1 to 0 as share goes from 0 to 1, slowly at both ends."""
    return 0.5 * (1 + math.cos(math.pi * share))


class ConstantRate(Schedule):
    """Constant at the peak."""

    def after_warmup(self, step: float) -> float:
        return self.peak


class Cosine(Schedule):
    """A cosine from the peak to min_lr (Loshchilov & Hutter 2017, without restarts)."""

    def after_warmup(self, step: float) -> float:
        return self.interpolate(half_cosine(progress(step, self.warmup, self.steps)))


class OneCycle(Cosine):
    """A cosine from a 25th of the peak up to it over a tenth of the steps, then down to min_lr.

    Smith & Topin (2018). It has its own warmup and ignores warmup_steps.
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        self.warmup = self.steps // 10

    def during_warmup(self, step: float) -> float:
        start = self.peak * ONE_CYCLE_START
        return start + (1 - half_cosine(step / self.warmup)) * (self.peak - start)


class LinearDecay(Schedule):
    """A straight line from the peak to min_lr (Devlin et al. 2019, with min_lr 0)."""

    def after_warmup(self, step: float) -> float:
        return self.interpolate(1 - progress(step, self.warmup, self.steps))


class Step(Schedule):
    """The peak, times lr_decay_factor every lr_decay_every steps after the warmup, to min_lr."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        self.factor, self.every = config.lr_decay_factor, config.lr_decay_every

    def position(self, step: int) -> float:
        """step -> the same: it decays after so many steps, however many a run has."""
        return step

    def after_warmup(self, step: float) -> float:
        return self.reduce(self.factor, int(step - self.warmup) // self.every)


class Exponential(Schedule):
    """Exponential decay from the peak to min_lr at the end."""

    def after_warmup(self, step: float) -> float:
        share = progress(step, self.warmup, self.steps)
        # A product of powers is exact at both ends; peak * (min_lr / peak)**share is not.
        return self.peak ** (1 - share) * self.min_lr**share


class WarmupStableDecay(Schedule):
    """The peak, then a straight line to min_lr over the last lr_decay_share of the steps.

    Hu et al. (2024), section 4; they decay exponentially, which cannot reach a min_lr of 0.
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        stable_end = self.steps - round(config.lr_decay_share * self.steps)
        self.decay_start = max(self.warmup, stable_end)

    def after_warmup(self, step: float) -> float:
        return self.interpolate(1 - progress(step, self.decay_start, self.steps))


class ReduceOnPlateau(Schedule):
    """The peak, multiplied by lr_decay_factor after plateau_patience evaluations without a lower
    loss, down to min_lr.

    As in PyTorch's ReduceLROnPlateau, a loss counts as lower if it is below the best by more than a
    ten-thousandth. PyTorch reduces one evaluation later than this.
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        self.factor, self.patience = config.lr_decay_factor, config.plateau_patience
        self.best: float | None = None
        self.waited = 0  # evaluations since the best or the last reduction
        self.reductions = 0

    def after_warmup(self, step: float) -> float:
        return self.reduce(self.factor, self.reductions)

    def observe(self, val_loss: float) -> None:
        threshold = math.inf if self.best is None else self.best * (1 - IMPROVEMENT)
        if val_loss < threshold:
            self.best, self.waited = val_loss, 0
            return
        self.waited += 1
        if self.waited == self.patience:
            self.reductions, self.waited = self.reductions + 1, 0

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "reductions": self.reductions}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
        self.reductions = state["reductions"]
