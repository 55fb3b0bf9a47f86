"""Figures of curves, in files. Needs matplotlib, which the rest of the package does not."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallmind.checks import InputError
from smallmind.cli.console import shorten

if TYPE_CHECKING:
    from smallmind.views.panels import Chart

SUFFIXES = (".png", ".pdf", ".svg")
COLUMNS = 4  # panels side by side
POINTS = 4000  # of a curve: more than a figure has pixels across
LEGEND = 50  # characters of a name
INSTALL = "python -m pip install matplotlib"


def has_matplotlib() -> bool:
    """True if Matplotlib is installed, so that figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def check_suffix(flag: str, file: Path) -> None:
    """InputError if matplotlib cannot write this kind of file."""
    if file.suffix not in SUFFIXES:
        raise InputError(f"{flag}: the name {file} must end in {', '.join(SUFFIXES)}")


def check_figure(flag: str, file: Path) -> None:
    """InputError if matplotlib is missing or cannot write this kind of file."""
    if not has_matplotlib():
        raise InputError(f"{flag} needs matplotlib: {INSTALL}")
    check_suffix(flag, file)


def draw_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, file: Path
) -> None:
    """Name -> xs and ys. Draws one panel per curve, as equal curves would hide each other."""
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(max(5, 3 * columns), max(3, 2.2 * rows)), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    for panel, (name, (xs, ys)) in zip(panels.flat, curves.items(), strict=False):
        panel.set_axis_on()
        panel.plot(xs, ys)
        panel.set_title(name, loc="left")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    figure.supxlabel(x)
    figure.supylabel(y)
    figure.savefig(file, dpi=120)


def draw_chart(chart: "Chart", file: Path) -> None:
    """Draws the panels of a chart below each other, over one axis, a color for each run."""
    from matplotlib.figure import Figure

    heights = [3 if panel.marks else 1 for panel in chart.panels]
    figure = Figure(figsize=(10, 1.6 * sum(heights)), layout="constrained")
    axes = figure.subplots(
        len(heights), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axis, panel in zip(axes, chart.panels, strict=True):
        for number, name in enumerate(chart.names):
            style: dict[str, Any] = {"color": f"C{number % 10}"}
            name = shorten(name, LEGEND)
            line, mean = panel.lines[number].thinned(POINTS), panel.means[number].thinned(POINTS)
            label = f"{name}: training, smoothed" if panel.marks else name
            axis.plot(chart.xs(mean), mean.values, **style, linewidth=1.4, label=label)
            if line is not mean:
                axis.plot(chart.xs(line), line.values, **style, alpha=0.2, linewidth=0.8)
            if panel.marks and len(marks := panel.marks[number]):
                style |= {"linestyle": "--", "marker": "o", "markersize": 3.5}
                axis.plot(chart.xs(marks), marks.values, **style, label=f"{name}: held-out")
        axis.set_ylabel(panel.title if not panel.unit else f"{panel.title} ({panel.unit})")
        axis.grid(alpha=0.3)
        if panel.marks:
            axis.legend(fontsize="small")
        if panel.y_range:
            axis.set_ylim(panel.y_range)
    axes[-1].set_xlabel(chart.x_name)
    figure.savefig(file, dpi=120)
