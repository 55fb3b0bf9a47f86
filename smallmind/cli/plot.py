"""Plot the losses, the learning rate and the gradient norm of runs."""

import argparse
import shutil
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smallmind.checks import InputError
from smallmind.cli.console import Console, full_width, shorten
from smallmind.cli.flags import add_runs, check_writable, runs_of
from smallmind.cli.text_plot import SAMPLES, Series, plot
from smallmind.console.live_line import can_print, fit

if TYPE_CHECKING:
    from smallmind.charts.curve import Curve
    from smallmind.views.panels import Chart, Panel

LABELS = string.ascii_uppercase + string.ascii_lowercase  # of runs
SMALL = 4  # rows of a panel without marks
AROUND = 20  # rows of everything but the first panel and the names, and the prompt
ROWS = range(8, 21)  # of the first panel
APART = 4  # columns between marks
GUTTER = 7  # columns for the labels of y axes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind plot`."""
    from smallmind.charts.curve import AXES

    add_runs(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a file to draw to, .png, .svg or .pdf, with matplotlib; default: draw in the "
        "terminal",
    )
    parser.add_argument(
        "--x",
        choices=AXES,
        default=AXES[0],
        help=f"the axis: steps, or time of training ({AXES[0]})",
    )
    parser.epilog = (
        "Runs may still be training. Training losses and gradient norms are smoothed, over a "
        "fiftieth of the run; --out also draws every logged step behind them. The axis leaves out "
        "the steep start of a loss. Example: smallmind plot runs/a runs/b --out loss.png"
    )


def run(options: argparse.Namespace) -> int:
    """Draws to the file, or in the terminal -> exit status."""
    from smallmind.cli.figures import INSTALL, check_suffix, draw_chart, has_matplotlib
    from smallmind.views.panels import chart_of
    from smallmind.views.run_view import open_view

    if options.out:
        check_suffix("--out", options.out)
        check_writable("--out", options.out)
    paths = runs_of(options)
    check_count(paths)
    views = [open_view(path) for path in paths]
    notes = Console(sys.stderr)
    for view in views:
        if view.problem and not view.settings:
            notes.line(f"{view.path}: {view.problem}")
    chart = chart_of(views, options.x)
    if not chart.x_end:
        raise InputError(f"{chart.names[0]} has logged no step yet: wait for its first ones")
    if options.out and has_matplotlib():
        draw_chart(chart, options.out)
        notes.line(f"Wrote the plot to {options.out}")
        return 0
    console = Console()
    ascii_only = not can_print(console.stream, SAMPLES)
    console.drawing(draw_text(chart, full_width(), shutil.get_terminal_size().lines, ascii_only))
    if options.out:
        notes.line(f"{options.out} was not written: that needs matplotlib: {INSTALL}")
        return 1
    return 0


def check_count(runs: Sequence[Path]) -> None:
    """InputError if there are more runs than LABELS."""
    if len(runs) > len(LABELS):
        raise InputError(f"{len(runs)} runs are too many to tell apart: name at most {len(LABELS)}")


def draw_text(chart: "Chart", width: int, height: int, ascii_only: bool) -> str:
    """A chart in characters, for a terminal of width columns and, if possible, height rows.

    Evaluations are marked with the letter of their run, or with an o if there is only one run.
    """
    several = len(chart.names) > 1
    marks = LABELS if several else "o"
    lines = [
        f"{marks[number]} " * several + _described(chart, number, width - 2 * several)
        for number in range(len(chart.names))
    ]
    first = min(max(height - AROUND - len(lines), ROWS[0]), ROWS[-1])
    for panel in chart.panels:
        series = [_line(chart, curve, width) for curve in panel.means]
        for number, curve in enumerate(panel.means):
            if panel.marks and len(panel.marks[number]):
                series.append(_marked(chart, panel.marks[number], marks[number], width))
            elif several and len(curve):
                series.append(_named(chart, curve, marks[number], number))
        rows, is_last = first if panel.marks else SMALL, panel is chart.panels[-1]
        x_range = 0.0, chart.x_end
        lines += ["", fit(_titles(panel, several), width)]
        y_range = panel.y_range
        lines.append(plot(series, width, rows, ascii_only, x_range, is_last, GUTTER, y_range))
    lines.append(f"{chart.x_name:>{width}}")
    return "\n".join(lines)


def _described(chart: "Chart", number: int, width: int) -> str:
    """The name of a run and its last losses, as far as they fit."""
    losses = chart.panels[0]
    kinds = {"training": losses.means[number], "held-out": losses.marks[number]}
    last = ", ".join(f"{kind} {c.values[-1]:.4f}" for kind, c in kinds.items() if len(c))
    name = chart.names[number]
    return (
        f"{name}: {last}" if last and len(name) + len(last) + 2 <= width else shorten(name, width)
    )


def _titles(panel: "Panel", several: bool) -> tuple[str, ...]:
    """The title of a panel, the longest variant first."""
    title = panel.title.capitalize() + (f" ({panel.unit})" if panel.unit else "")
    is_smooth = panel.means != panel.lines
    if not any(map(len, panel.marks)):
        return (f"{title}, smoothed" if is_smooth else title, title)
    marks = f"{'letters' if several else 'o'}: held-out"
    return f"{title}; line: training, smoothed; {marks}", f"{title}; {marks}"


def _line(chart: "Chart", curve: "Curve", width: int) -> Series:
    """A curve as a line, with no more points than dots across."""
    thin = curve.thinned(4 * width)
    return Series(chart.xs(thin), thin.values)


def _marked(chart: "Chart", curve: "Curve", mark: str, width: int) -> Series:
    """Marks on points of a curve that are not too close, from its last one back."""
    every = -(-len(curve) * APART // width)
    return Series(chart.xs(curve)[::-every], curve.values[::-every], mark)


def _named(chart: "Chart", curve: "Curve", mark: str, number: int) -> Series:
    """One mark on a curve, for each run at another place."""
    place = len(curve) * (number + 1) // (len(chart.names) + 1)
    return Series(chart.xs(curve)[place : place + 1], curve.values[place : place + 1], mark)
