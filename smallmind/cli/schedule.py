"""Show the learning rate over a run, as a table and as a plot."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from smallmind.checks import InputError, count_of
from smallmind.cli.console import WIDTH, Console
from smallmind.cli.flags import (
    add_config_flags,
    add_source_flags,
    choices_of,
)
from smallmind.console.live_line import can_print
from smallmind.console.table import BOX, Table
from smallmind.settings.config import SCHEDULES, TrainingConfig

if TYPE_CHECKING:
    from smallmind.optim.schedule import Schedule

SCHEDULE_FIELDS = (
    "steps",
    "learning_rate",
    "min_lr",
    "warmup_steps",
    "warmup_share",
    "lr_decay_factor",
    "lr_decay_every",
    "lr_decay_share",
    "plateau_patience",
)
CURVE_POINTS = 2000  # of a plot, besides the last step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind schedule`."""
    parser.usage = f"{parser.prog} [-h] [FLAG [VALUE]] ..."
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default=argparse.SUPPRESS,
        help="show only this schedule; default: all side by side",
    )
    add_config_flags(parser, TrainingConfig, SCHEDULE_FIELDS)
    add_source_flags(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the curves to FILE.png; or .pdf or .svg"
    )


def run(options: argparse.Namespace) -> int:
    """Shows tables of the schedules side by side, and their plot."""
    choices = choices_of(options)
    given = choices.chosen
    names = [str(given["schedule"])] if "schedule" in given else SCHEDULES
    configs: dict[str, TrainingConfig] = {}
    errors: dict[str, InputError] = {}
    for name in names:
        try:
            config = choices.having(schedule=name).settings().training
            configs[name] = config.with_warmup(0).with_min_lr()
        except InputError as error:
            errors[name] = error
    if not configs:
        raise next(iter(errors.values()))
    config = next(iter(configs.values()))
    if given.get("warmup_epochs"):
        raise InputError(
            "the length of an epoch depends on the text: give --warmup-steps or --warmup-share"
        )
    if "steps" not in given and (config.epochs or given.get("minutes")):
        raise InputError("the number of steps depends on epochs or minutes here: give --steps")
    if not config.steps:
        raise InputError("steps=0 must be at least 1 for a learning rate to show")
    if options.plot:
        from smallmind.cli.figures import INSTALL, check_figure, lacks_matplotlib

        check_figure("--plot", options.plot)
        if lacks_matplotlib(options.plot):
            raise InputError(f"--plot needs matplotlib: {INSTALL}")
    _show(Console(), configs, errors, options.plot)
    return 0


def _show(
    console: Console,
    configs: dict[str, TrainingConfig],
    errors: dict[str, InputError],
    plot: Path | None,
) -> None:
    """Prints the tables of the schedules and why others are left out; draws the plot."""
    from smallmind.optim.schedule import schedule, too_short

    schedules = {name: schedule(config) for name, config in configs.items()}
    config = next(iter(configs.values()))
    steps = _steps(schedules, config)
    width = max(len("step"), len(f"{steps[-1]:,}"))
    rows = [[f"{n:{width},}", *(f"{s.lr(n - 1):.1e}" for s in schedules.values())] for n in steps]
    table, ascii_only = (
        Table("LEARNING RATE", rows, ["step", *schedules]),
        not can_print(console.stream, BOX),
    )
    for part in table.parts(lambda part: part.box(ascii_only=ascii_only), WIDTH):
        console.drawing(part)
    if "plateau" in schedules:
        console.line(
            "plateau is shown for a held-out loss that keeps falling; after "
            f"{count_of(config.plateau_patience, 'evaluation')} without improvement the rate is "
            f"multiplied by {config.lr_decay_factor:g}, down to {configs['plateau'].min_lr:g}"
        )
    if config.optimizer == "muon":
        console.line(
            f"Muon's matrices follow the same curve, up to {config.matrix_learning_rate:g}"
        )
    for name, error in errors.items():
        console.line(f"{name} is not shown: {error}")
    if shortcoming := too_short(config):
        console.warning(shortcoming)
    if plot:
        _draw(schedules, config.steps, plot)
        console.line(f"Wrote the plot to {plot}")


def _steps(schedules: "dict[str, Schedule]", config: TrainingConfig) -> list[int]:
    """Lists the steps to show, from 1: warmups, peaks, every tenth of the run, 95 % of it."""
    steps = {1, config.steps * 19 // 20, *(config.steps * tenth // 10 for tenth in range(1, 11))}
    for s in schedules.values():
        steps |= {s.warmup // 2, s.warmup + 1}
    return sorted(step for step in steps if 1 <= step <= config.steps)


def _draw(schedules: "dict[str, Schedule]", last: int, file: Path) -> None:
    """Draws a panel for each schedule, as equal curves would hide each other."""
    from smallmind.charts.curve import Curve
    from smallmind.charts.figure import Figure, Line, Panel
    from smallmind.charts.svg import picture
    from smallmind.cli.figures import save

    steps = sorted({*range(1, last + 1, math.ceil(last / CURVE_POINTS)), last})
    curves = {
        name: Curve(steps, steps, [s.lr(n - 1) for n in steps]) for name, s in schedules.items()
    }
    panels = [
        Panel(name, "", [Line(name, curve)], from_zero=True, is_small=True)
        for name, curve in curves.items()
    ]
    save(picture(Figure("Learning rate by step", panels)), file)
