"""What a plot of runs shows: panels of curves over steps or time, however they are drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from smallmind.charts.axis import worth_seeing
from smallmind.charts.curve import Curve
from smallmind.console.live_line import printable
from smallmind.views.run_view import PLOTTED, RunView

# Above how many seconds a time axis has another unit, and its seconds.
UNITS = ((3 * 3600, 3600, "hours"), (300, 60, "minutes"), (-math.inf, 1, "seconds"))


@dataclass
class Panel:
    """Curves over one axis, one for each run.

    `means` are smoothed where `lines` are noisy, and the same otherwise; `marks` are single points,
    as of evaluations.
    """

    title: str
    unit: str
    lines: list[Curve]
    means: list[Curve]
    marks: list[Curve] = field(default_factory=list)

    @property
    def y_range(self) -> tuple[float, float] | None:
        """What is worth seeing of the means, and all marks. None if they are all the same."""
        means, marks = (
            [value for curve in curves for value in curve.values]
            for curves in (self.means, self.marks)
        )
        if not means and not marks:
            return None
        low, high = worth_seeing(means or marks, marks)
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # they may differ by rounding
            return None
        margin = 0.04 * (high - low)
        return low - margin, high + margin


@dataclass
class Chart:
    """Panels that share an axis, steps or time, from 0 on; seconds are in the unit of the axis."""

    names: list[str]  # of the runs
    panels: list[Panel]
    axis: str  # one of AXES
    x_name: str
    x_end: float


def chart_of(runs: Sequence[RunView], axis: str) -> Chart:
    """Training and held-out loss, learning rate and gradient norm of some runs."""
    found = {name: [run.curves[name].finite() for run in runs] for name in PLOTTED}
    every = [curve for curves in found.values() for curve in curves if len(curve)]
    end = max((float(curve.xs(axis)[-1]) for curve in every), default=0.0)
    x_name = "steps"
    if axis == "time":
        _, seconds, unit = next(row for row in UNITS if end >= row[0])
        x_name, end = f"{unit} of training", end / seconds
        for curves in found.values():
            curves[:] = [Curve(c.steps, [x / seconds for x in c.seconds], c.values) for c in curves]
    loss, rate, norm = found["loss"], found["lr"], found["grad_norm"]
    panels = [
        Panel("loss", "nats per token", loss, _smoothed(loss), found["val_loss"]),
        Panel("learning rate", "", rate, rate),
        Panel("gradient norm", "", norm, _smoothed(norm)),
    ]
    names = [printable(str(run.path)).replace("\n", " ") for run in runs]
    return Chart(names, panels, axis, x_name, end)


def _smoothed(curves: list[Curve]) -> list[Curve]:
    return [curve.smoothed() for curve in curves]
