"""Estimates the time of a run from a few passes that are timed."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from smallmind.checks import count_of
from smallmind.settings.config import Precision, TrainingConfig

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.forecast.pace import Pace
    from smallmind.runs.creating import Prepared
    from smallmind.runs.run import Run

MAX_PARAMETERS = 500_000_000  # a larger model takes long to initialise
SLOWER_RATIO = 1.05  # from which it is said
WIDE_SPREAD = 1.5  # of what was timed, from which the time is a range
# Above how many seconds, and their names: 1.5 minutes are 90 seconds.
UNITS = ((36 * 3600, 24 * 3600, "days"), (90 * 60, 3600, "h"), (90, 60, "min"), (0, 1, "s"))


def time_of_run(run: "Run") -> str:
    """Returns the time left for a run that is about to start or resume: "about 2 min"."""
    from smallmind.forecast.pace import kept_pace

    config, newest = run.settings.training, run.newest()
    done = newest.step if newest else 0
    pace = run.session.pace or kept_pace(run.training, config)
    return _time(pace, config, config.steps if run.files.has_ended else done)


def slower_than_float32(run: "Run") -> str:
    """Says that float32 is faster here, if runs like this one were timed in both; else nothing."""
    from smallmind.forecast.pace import earlier_pace, kept_pace

    training, config = run.training, run.settings.training
    precision = training.model.precision
    if not precision.has_16_bits or run.session.pace:
        return ""
    other = dataclasses.replace(config, precision=Precision.FLOAT32, use_mixed_precision=False)
    plain = earlier_pace(training, other)
    if plain is None or (ratio := kept_pace(training, config).step / plain.step) < SLOWER_RATIO:
        return ""
    return (
        f"{precision} saves memory, not time: here, steps took {ratio:.2f} times as long as in "
        "float32 when both were timed"
    )


def time_of_prepared(prepared: "Prepared") -> str | None:
    """Times a run that is prepared, and its steps; None if that would take long."""
    from smallmind.forecast.pace import most_steps, rough_pace
    from smallmind.nn.network import declare_parameters

    settings, config = prepared.settings, prepared.settings.training
    seconds = 60 * settings.run.minutes if settings.run.minutes else None
    if declare_parameters(settings.model).count > MAX_PARAMETERS:
        return about(seconds) if seconds else None
    pace = rough_pace(prepared.training(), config)
    if seconds:
        config = dataclasses.replace(config, steps=most_steps(config, prepared.data))
        return _time(pace, config, most=seconds)
    milliseconds = 1000 * pace.step
    step = f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"
    return f"{_time(pace, config)}, {count_of(config.steps, 'step')} of {step} ms"


def _time(pace: "Pace", config: TrainingConfig, done: int = 0, most: float = math.inf) -> str:
    """Says the time left after `done` steps, if the run may take at most `most` seconds."""
    may_end_early = config.early_stopping_patience or config.target_loss is not None
    bound = "at most " if may_end_early and done < config.steps else ""
    # Other programs that slowed down what was timed may end sooner than the run.
    seconds = pace.total(config, done) / (pace.spread if pace.spread >= WIDE_SPREAD else 1.0)
    seconds = min(most, seconds)
    return bound + about(seconds, min(pace.spread, most / seconds) if seconds else 1.0)


def about(seconds: float, spread: float = 1.0) -> str:
    """Seconds, roughly -> about 20 s, about 2 min, about 3 h, about 4 days.

    A range, such as "about 2 to 4 min", if they may become `spread` times as many.
    """
    longest = seconds * spread if spread >= WIDE_SPREAD else seconds
    _, unit, name = next(row for row in UNITS if longest >= row[0])

    def rounded(count: float, to_whole: Callable[[float], int]) -> int:
        return max(1, to_whole(count) if count < 20 else 5 * to_whole(count / 5))

    least = most = rounded(seconds / unit, round)
    if longest > seconds:
        most = rounded(longest / unit, math.ceil)
    return f"about {least} to {most} {name}" if least < most else f"about {most} {name}"
