"""How many steps fit in a time: some are measured, and the number of all follows."""

import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from smallmind.config import InputError, TrainingConfig
from smallmind.generation import generate
from smallmind.training.checkpoint import save
from smallmind.training.loop import Training
from smallmind.training.records import StepRecord

COLD_STEPS = 2  # that wait for kernels and memory, and are not measured
LEAST_STEPS = 5  # that are
MOST_SECONDS = 5.0  # of a rehearsal that has them
SHARE = 0.05  # of the whole time that such a rehearsal may take
SLACK = 0.02  # share of the time that is left free: no two steps take the same
WARMUP_SHARE = 10  # the warmup is at most the tenth part of the steps
SAMPLE_TOKENS = 40  # of a sample that is measured


@dataclass(frozen=True)
class Pace:
    """What the parts of a run take. Units: seconds."""

    step: float
    evaluation: float
    save: float
    end: float  # once, after the last step

    def total(self, config: TrainingConfig) -> float:
        """A run of config.steps in which every evaluation is the best so far, and saved."""
        steps, val_every, save_every = config.steps, config.val_every, config.save_every
        evaluations = steps // val_every + 1 if val_every else 0
        saves = 1 + sum(steps // every for every in {val_every, save_every} if every)
        return (
            steps * self.step + evaluations * self.evaluation + saves * self.save + self.end
        )  # fmt: skip


def measure(
    training: Training,
    config: TrainingConfig,
    seconds: float,
    directory: Path,
    sample_tokens: int = 0,
) -> Pace:
    """The pace of a run that shall take so many seconds, and save in directory.

    Its end is an evaluation of the whole held-out part and a sample of so many tokens. Some steps
    are made on the way; the training is afterwards as it was.
    """
    with _rehearsal(training) as rehearsal:
        step = _step(rehearsal, config, min(MOST_SECONDS, SHARE * seconds))
        rehearsal.spikes.keep(rehearsal.checkpoint())  # as where a run saves
        with tempfile.TemporaryDirectory(dir=directory) as scratch, _timed() as saving:
            save(scratch, rehearsal.checkpoint(), best=True)
        batches = config.val_batches if config.val_every else 1
        rehearsal.evaluate(0, 1)
        with _timed() as evaluating:
            rehearsal.evaluate(0, batches)
        with _timed() as sampling:
            if sample_tokens:
                generate(training.model, training.tokenizer, max_tokens=SAMPLE_TOKENS)
    # Of all held-out text, whose windows overlap by half, beside as many windows of each part.
    whole = evaluating[0] * training.dataset.held_out_batches / (batches or 1)
    return Pace(
        step=step,
        evaluation=evaluating[0] if config.val_every else 0.0,
        save=saving[0],
        end=(whole if batches else evaluating[0]) + sampling[0] * sample_tokens / SAMPLE_TOKENS,
    )


def fit_steps(config: TrainingConfig, pace: Pace, seconds: float) -> TrainingConfig:
    """The same with as many steps as fit, and a warmup of at most a tenth of them.

    InputError where not one does.
    """

    def fits(steps: int) -> bool:
        total = pace.total(dataclasses.replace(config, steps=steps))
        return total <= (1 - SLACK) * seconds

    if not fits(1):
        needed = pace.total(dataclasses.replace(config, steps=10)) / (1 - SLACK)
        raise InputError(
            f"{max(0, seconds):.1f} seconds are left, and 10 steps with all that belongs to a run "
            f"take {needed:.1f}: give more minutes, or a smaller model"
        )
    least, most = 1, math.ceil(seconds / pace.step) + 1  # which is too many
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    warmup = min(config.warmup_steps, least // WARMUP_SHARE)
    return dataclasses.replace(config, steps=least, warmup_steps=warmup)


def _step(rehearsal: Training, config: TrainingConfig, seconds: float) -> float:
    """Seconds a step."""
    config = dataclasses.replace(
        config, steps=10**9, epochs=0, schedule="constant", val_every=0, save_every=0, log_every=1,
        enable_diagnostics=False, check_gradient_health=False,
    )  # fmt: skip
    ends: list[float] = []
    records = rehearsal.steps(config)
    for record in records:
        if isinstance(record, StepRecord):
            ends.append(time.perf_counter())
        steps = len(ends) - COLD_STEPS
        if steps >= LEAST_STEPS and ends[-1] - ends[COLD_STEPS - 1] >= seconds:
            break
    records.close()
    return (ends[-1] - ends[COLD_STEPS - 1]) / steps


@contextmanager
def _rehearsal(training: Training) -> Iterator[Training]:
    """Within the block a training on the same model, which is then as it was."""
    model, distillation = training.model, training.distillation
    values, passes = model.flat.data.copy(), model.passes
    temperature = distillation and distillation.state()
    try:
        yield copy.copy(training)
    finally:
        model.flat.data[:] = values
        model.flat.refresh()
        model.zero_gradients()
        model.passes = passes
        if distillation and temperature:
            distillation.load_state(temperature)
            distillation.zero_gradient()


@contextmanager
def _timed() -> Iterator[list[float]]:
    """A list that holds the seconds of the block at its end."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)
