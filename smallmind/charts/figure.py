"""A figure of curves, described once however it is drawn: panels of lines over one axis."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smallmind.charts.axis import format_tick, ticks, worth_seeing
from smallmind.charts.curve import Curve

# Above how many seconds a time axis has another unit, and its seconds.
UNITS = ((3 * 3600, 3600, "hours"), (300, 60, "minutes"), (-math.inf, 1, "seconds"))


@dataclass(frozen=True)
class Line:
    """A curve in a panel. A faint one is behind the others, and not in the legend."""

    name: str
    points: Curve
    run: int = 0  # lines of one run have one colour
    faint: bool = False
    dots: bool = False  # single points, as of evaluations


@dataclass(frozen=True)
class Panel:
    """Lines over the axis of a figure, and the range of the other axis."""

    title: str
    unit: str
    lines: Sequence[Line]
    from_zero: bool = False
    is_small: bool = False
    shows_all: bool = False  # also steep starts and single spikes

    @property
    def label(self) -> str:
        """The title and the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def y_range(self) -> tuple[float, float]:
        """The range worth seeing of the lines that are not faint, and all dots, with a margin."""
        shown = [line for line in self.lines if not line.faint]
        dots = [value for line in shown if line.dots for value in line.points.values]
        values = [value for line in shown if not line.dots for value in line.points.values]
        others = [*dots, *(values if self.shows_all else ())]
        low, high = worth_seeing(values or dots or [0.0], others)
        margin = 0.05 * (high - low)
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # they may differ by rounding
            margin = 0.05 * abs(high) or 1.0
        return 0.0 if self.from_zero else low - margin, high + margin


@dataclass(frozen=True)
class Figure:
    """Panels over steps, or over time if `seconds` has those of its unit; both begin at 0."""

    title: str  # is read aloud
    panels: Sequence[Panel]
    x_name: str = "steps"
    seconds: float = 0.0

    def xs(self, curve: Curve) -> Sequence[float]:
        """Returns the places of a curve on the axis, in its unit."""
        return [x / self.seconds for x in curve.seconds] if self.seconds else curve.steps

    @property
    def x_range(self) -> tuple[float, float]:
        """The range of the axis, to the last point of all lines."""
        curves = [line.points for panel in self.panels for line in panel.lines if line.points]
        ends = [(self.xs(curve)[0], self.xs(curve)[-1]) for curve in curves]
        return min([0.0, *(x for x, _ in ends)]), max((float(x) for _, x in ends), default=0.0)

    def x_ticks(self, count: int) -> list[tuple[float, str]]:
        """Returns at most about count places on the axis, and their labels."""
        left, right = self.x_range
        right = right if right > left else left + 1
        return [(tick, format_tick(tick)) for tick in ticks(left, right, count)]


def losses(runs: Sequence[tuple[str, Curve, Curve]]) -> Panel:
    """-> the losses of runs: every training loss faintly, their mean, and evaluations."""
    lines = []
    for run, (name, loss, held_out) in enumerate(runs):
        name = f"{name}: " if len(runs) > 1 else ""
        lines += noisy(f"{name}training loss", loss, run)
        lines.append(Line(f"{name}held-out loss", held_out, run, dots=True))
    return Panel("loss", "nats per token", lines)


def lines(
    title: str,
    values: Mapping[str, Iterable[float]],
    xs: Iterable[float],
    x_name: str = "steps",
    y_name: str = "",
) -> Figure:
    """Named numbers at xs (n,) -> a line for each, over one axis."""
    places = list(map(float, xs))
    drawn = [
        Line(name, Curve(range(len(places)), places, list(map(float, numbers))).finite(), run)
        for run, (name, numbers) in enumerate(values.items())
    ]
    return Figure(title, [Panel(y_name or title, "", drawn, shows_all=True)], x_name, seconds=1.0)


def losses_of(loss: Curve, held_out: Curve) -> Figure:
    """Returns the losses of one run by step."""
    return Figure("Training and held-out loss by step", [losses([("", loss, held_out)])])


def noisy(name: str, curve: Curve, run: int = 0) -> list[Line]:
    """Returns two lines: the curve, faintly, and its mean."""
    return [Line(name, curve, run, faint=True), Line(f"{name}, smoothed", curve.smoothed(), run)]


def training(runs: Sequence[tuple[str, Mapping[str, Curve]]], axis: str) -> Figure:
    """Returns the losses, learning rates and gradient norms of runs over one of AXES."""
    named = [(name, {x: curve.finite() for x, curve in curves.items()}) for name, curves in runs]
    numbered = list(enumerate(named))
    rates = [Line(name, curves["lr"], run) for run, (name, curves) in numbered]
    norms = [noisy(name, curves["grad_norm"], run) for run, (name, curves) in numbered]
    panels = [
        losses([(name, curves["loss"], curves["val_loss"]) for name, curves in named]),
        Panel("learning rate", "", rates, is_small=True),
        Panel("gradient norm", "", list(itertools.chain(*norms)), is_small=True),
    ]
    title = "Training of " + ", ".join(name for name, _ in runs)
    if axis == "steps":
        return Figure(title, panels)
    end = Figure(title, panels, seconds=1.0).x_range[1]
    _, seconds, unit = next(row for row in UNITS if end >= row[0])
    return Figure(title, panels, f"{unit} of training", seconds)
