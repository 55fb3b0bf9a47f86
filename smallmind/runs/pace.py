"""How many steps fit in a given time, extrapolated from a few that are timed."""

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from smallmind.activity import clock
from smallmind.config import InputError, TrainingConfig
from smallmind.generation import generate
from smallmind.training.checkpoint import save
from smallmind.training.loop import Training
from smallmind.training.records import StepRecord
from smallmind.training.state import split_snapshot

COLD_STEPS = 2  # not timed: they wait for kernels and memory
MIN_STEPS = 5  # timed at least
MAX_SECONDS = 5.0  # of timing, once MIN_STEPS are done
MAX_SHARE = 0.05  # of the whole time spent on timing
SLACK = 0.02  # share of the time that is left unused: steps vary
WARMUP_SHARE = 10  # the warmup takes at most a tenth of the steps
SAMPLE_TOKENS = 40  # of the sample that is timed


@dataclass(frozen=True)
class Pace:
    """How long the parts of a run take. Units: seconds."""

    step: float
    evaluation: float
    save: float
    end: float  # once, after the last step

    def total(self, config: TrainingConfig) -> float:
        """The time of config.steps if every evaluation is the best so far and therefore saved."""
        steps, val_every, save_every = config.steps, config.val_every, config.save_every
        evaluations = steps // val_every + 1 if val_every else 0
        saves = 1 + sum(steps // every for every in {val_every, save_every} if every)
        evaluating, saving = evaluations * self.evaluation, saves * self.save
        return steps * self.step + evaluating + saving + self.end


def measure(
    training: Training,
    config: TrainingConfig,
    seconds: float,
    directory: Path,
    sample_tokens: int = 0,
) -> Pace:
    """The pace of a run of about `seconds` that saves to directory.

    The run ends with an evaluation of the whole held-out part and a sample of `sample_tokens`
    tokens. Trains some steps, and restores model and training afterwards.
    """
    with training.preserved():
        step = _step(training, config, min(MAX_SECONDS, MAX_SHARE * seconds))
        state, _ = split_snapshot(training.state())
        training.spikes.keep(state)  # as a run does before it saves
        with tempfile.TemporaryDirectory(dir=directory) as scratch, _timed() as saving:
            save(scratch, training.state(), best=True)
        batches = config.val_batches if config.val_every else 1
        training.evaluate(0, 1)
        with _timed() as evaluating:
            training.evaluate(0, batches)
        with _timed() as sampling:
            if sample_tokens:
                generate(training.model, training.tokenizer, max_tokens=SAMPLE_TOKENS)
    # The windows of the whole held-out part overlap by half: twice as many as its tokens need,
    # like the windows of both parts here.
    whole = evaluating[0] * training.data.held_out_batches / (batches or 1)
    return Pace(
        step=step,
        evaluation=evaluating[0] if config.val_every else 0.0,
        save=saving[0],
        end=(whole if batches else evaluating[0]) + sampling[0] * sample_tokens / SAMPLE_TOKENS,
    )


def fit_steps(config: TrainingConfig, pace: Pace, seconds: float) -> TrainingConfig:
    """The config with the number of steps that fit, at most a tenth of them warmup.

    InputError if not even one fits.
    """

    def fits(steps: int) -> bool:
        total = pace.total(dataclasses.replace(config, steps=steps))
        return total <= (1 - SLACK) * seconds

    if not fits(1):
        needed = pace.total(dataclasses.replace(config, steps=10)) / (1 - SLACK)
        raise InputError(
            f"{max(0, seconds):.1f} seconds are left, and a run of 10 steps takes {needed:.1f}: "
            "give more minutes, or a smaller model"
        )
    fitting, too_many = 1, math.ceil(seconds / pace.step) + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    warmup = min(config.warmup_steps, fitting // WARMUP_SHARE)
    return dataclasses.replace(config, steps=fitting, warmup_steps=warmup)


def _step(training: Training, config: TrainingConfig, seconds: float) -> float:
    """Trains for about `seconds` -> seconds per step."""
    config = dataclasses.replace(
        config,
        steps=10**9,
        epochs=0,
        schedule="constant",
        val_every=0,
        save_every=0,
        log_every=1,
        enable_diagnostics=False,
        check_gradient_health=False,
    )
    ends: list[float] = []
    records = training.steps(config)
    for record in records:
        if isinstance(record, StepRecord):
            ends.append(clock())
        steps = len(ends) - COLD_STEPS
        if steps >= MIN_STEPS and ends[-1] - ends[COLD_STEPS - 1] >= seconds:
            break
    records.close()
    return (ends[-1] - ends[COLD_STEPS - 1]) / steps


@contextmanager
def _timed() -> Iterator[list[float]]:
    """A list that holds the seconds of the block once it has ended."""
    seconds: list[float] = []
    start = clock()
    yield seconds
    seconds.append(clock() - start)
