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
from smallmind.cli.flags import add_runs, runs_of
from smallmind.console.live_line import can_print, fit, printable

if TYPE_CHECKING:
    from smallmind.charts.figure import Figure, Panel

LABELS = string.ascii_uppercase + string.ascii_lowercase  # of runs
SMALL = 4  # rows of a panel without marks
AROUND = 20  # rows of everything but the first panel and the names, and the prompt
ROWS = range(8, 21)  # of the first panel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind plot`."""
    from smallmind.charts.curve import AXES

    add_runs(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a file to draw to: .svg or, with matplotlib, .png or .pdf; default: draw in the "
        "terminal",
    )
    parser.add_argument(
        "--x",
        choices=AXES,
        default=AXES[0],
        help=f"x axis: steps, or training time ({AXES[0]})",
    )
    parser.epilog = (
        "Runs may still be training. Training losses and gradient norms are smoothed over a "
        "hundredth of the run; --out also draws every logged step behind them. The loss axis "
        "omits the steep start. Example: smallmind plot runs/a runs/b --out loss.png"
    )


def run(options: argparse.Namespace) -> int:
    """Draws to the file, or in the terminal -> exit status."""
    from smallmind.charts.figure import training
    from smallmind.charts.svg import picture
    from smallmind.charts.text import SAMPLES
    from smallmind.cli.figures import INSTALL, check_figure, lacks_matplotlib, save
    from smallmind.views.run_view import open_view

    if options.out:
        check_figure("--out", options.out)
    paths = runs_of(options)
    check_count(paths)
    views = [open_view(path) for path in paths]
    notes = Console(sys.stderr)
    for view in views:
        if view.problem and not view.settings:
            notes.line(f"{view.path}: {view.problem}")
    names = [printable(str(path)).replace("\n", " ") for path in paths]
    curves = [view.curves for view in views]
    figure = training(list(zip(names, curves, strict=True)), options.x)
    if not figure.x_range[1]:
        raise InputError(f"{names[0]} has not logged a step yet: wait for the first")
    if options.out and not lacks_matplotlib(options.out):
        save(picture(figure), options.out)
        notes.line(f"Wrote the plot to {options.out}")
        return 0
    console = Console()
    ascii_only = not can_print(console.stream, SAMPLES)
    height = shutil.get_terminal_size().lines
    console.drawing(draw_text(figure, names, full_width(), height, ascii_only))
    if options.out:
        notes.line(f"{options.out} was not written: that needs matplotlib: {INSTALL}")
        return 1
    return 0


def check_count(runs: Sequence[Path]) -> None:
    """Raises InputError if there are more runs than LABELS."""
    if len(runs) > len(LABELS):
        raise InputError(f"{len(runs)} runs are too many to tell apart: name at most {len(LABELS)}")


def draw_text(
    figure: "Figure", names: Sequence[str], width: int, height: int, ascii_only: bool
) -> str:
    """-> a figure in characters, for a terminal of width columns and, if possible, height rows.

    Evaluations are marked with the letter of their run, or with an o if there is only one run.
    """
    from smallmind.charts.text import draw

    several = len(names) > 1
    marks = LABELS if several else "o"
    lines = []
    for run, name in enumerate(names):
        text = _described(figure.panels[0], run, name, width - 2 * several)
        lines.append(f"{marks[run]} {text}" if several else text)
    first = min(max(height - AROUND - len(lines), ROWS[0]), ROWS[-1])
    for panel in figure.panels:
        rows = SMALL if panel.is_small else first
        lines += ["", fit(_titles(panel, several), width)]
        lines.append(draw(figure, panel, width, rows, ascii_only, marks[: len(names)]))
    lines.append(f"{figure.x_name:>{width}}")
    return "\n".join(lines)


def _described(losses: "Panel", run: int, name: str, width: int) -> str:
    """Returns the name of a run and its last losses, as far as they fit."""
    shown = [line for line in losses.lines if line.run == run and not line.faint]
    for loss in (" loss", ""):
        last = ", ".join(
            f"{'held-out' if line.dots else 'training'}{loss} {line.points.values[-1]:.4f}"
            for line in shown
            if len(line.points)
        )
        if last and len(name) + len(last) + 2 <= width:
            return f"{name}: {last}"
    return shorten(name, width)


def _titles(panel: "Panel", several: bool) -> tuple[str, ...]:
    """Returns the title of a panel, the longest variant first."""
    title = panel.label.capitalize()
    if not any(line.dots and len(line.points) for line in panel.lines):
        is_smooth = any(line.faint for line in panel.lines)
        return (f"{title}, smoothed" if is_smooth else title, title)
    marks = f"{'letters' if several else 'o'}: held-out"
    return f"{title}; line: training, smoothed; {marks}", f"{title}; {marks}"
