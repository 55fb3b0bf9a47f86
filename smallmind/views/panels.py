"""A plot of runs: panels of curves over steps or time, however they are drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from smallmind.charts.axis import worth_seeing
from smallmind.charts.curve import Curve
from smallmind.console.live_line import printable
from smallmind.views.run_view import RunView

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
        """The range worth seeing of the means, and all marks. None if they are all the same."""
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
    """Panels that share an axis: steps or time, from 0 on."""

    names: list[str]  # of the runs
    panels: list[Panel]
    axis: str  # one of AXES
    x_name: str
    x_end: float
    seconds: float  # to a unit of the axis, if that is time

    def xs(self, curve: Curve) -> Sequence[float]:
        """The places of a curve on the axis, in its unit."""
        if self.axis == "steps":
            return curve.steps
        return [seconds / self.seconds for seconds in curve.seconds]


def chart_of(runs: Sequence[RunView], axis: str) -> Chart:
    """Training and held-out loss, learning rate and gradient norm of some runs."""

    def curves(name: str) -> list[Curve]:
        return [run.curves[name].finite() for run in runs]

    loss, rate, norm = curves("loss"), curves("lr"), curves("grad_norm")
    panels = [
        Panel("loss", "nats per token", loss, _smoothed(loss), curves("val_loss")),
        Panel("learning rate", "", rate, rate),
        Panel("gradient norm", "", norm, _smoothed(norm)),
    ]
    every = [curve for panel in panels for curve in panel.lines + panel.marks if len(curve)]
    end = max((float(curve.xs(axis)[-1]) for curve in every), default=0.0)
    names = [printable(str(run.path)).replace("\n", " ") for run in runs]
    if axis == "steps":
        return Chart(names, panels, axis, "steps", end, 1.0)
    _, seconds, unit = next(row for row in UNITS if end >= row[0])
    return Chart(names, panels, axis, f"{unit} of training", end / seconds, seconds)


def _smoothed(curves: list[Curve]) -> list[Curve]:
    return [curve.smoothed() for curve in curves]
