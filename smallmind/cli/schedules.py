"""The learning rate over a run, as a table and as a plot."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smallmind.box import can_print, draw
from smallmind.cli.console import Console
from smallmind.config import InputError, TrainingConfig

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.optim.schedule import Schedule

CURVE_POINTS = 2000  # of a plot, and the last step


def show_schedules(
    console: Console, config: TrainingConfig, names: Sequence[str], plot: Path | None
) -> None:
    """The schedules of these names side by side, for the settings of config; drawn into plot."""
    from smallmind.optim.schedule import schedule

    shown, left_out = {}, []
    for name in names:
        try:
            shown[name] = schedule(dataclasses.replace(config, schedule=name))
        except InputError as error:
            left_out.append(f"{name} is left out: {error}")
    _table(console, shown, config)
    for reason in left_out:
        console.line(reason)
    if plot:
        _draw(shown, config.steps, plot)
        console.line(f"The plot is in {plot}")


def _table(console: Console, schedules: "dict[str, Schedule]", config: TrainingConfig) -> None:
    """A row a step: the first, in the warmups, the peaks, every tenth of the run, 95 % of it."""
    # As train's records count them: from 1 to the last.
    steps = {1, config.steps * 19 // 20, *(config.steps * tenth // 10 for tenth in range(1, 11))}
    for s in schedules.values():
        steps |= {s.warmup // 2, s.warmup + 1}
    heads = ["at step", *schedules]
    width = max(len(heads[0]), len(f"{config.steps:,}"))
    rows = [
        [f"{n:{width},}", *(f"{s.lr(n - 1):.1e}" for s in schedules.values())]
        for n in sorted(steps)
        if 1 <= n <= config.steps
    ]
    ascii_only = not can_print(console.stream)
    console.line(draw("LEARNING RATE", heads, rows, ascii_only=ascii_only).rstrip())
    if "plateau" in schedules:
        console.line(
            "plateau is shown while the held-out loss falls; "
            f"{config.plateau_patience} evaluations without a lower one multiply it by "
            f"{config.lr_decay_factor:g}, never under {config.resolved_min_lr:g}"
        )


def _draw(schedules: "dict[str, Schedule]", last: int, file: Path) -> None:
    from smallmind.cli.plot import draw_curves

    steps = sorted({*range(1, last + 1, math.ceil(last / CURVE_POINTS)), last})
    curves = {name: (steps, [s.lr(n - 1) for n in steps]) for name, s in schedules.items()}
    draw_curves(curves, "step", "learning rate", file)
