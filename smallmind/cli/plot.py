"""Plots of curves. Needs matplotlib, which the rest of the package does not."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from smallmind.checks import InputError

SUFFIXES = (".png", ".pdf", ".svg")
COLUMNS = 4  # panels side by side


def check_plot(file: Path) -> None:
    """InputError if matplotlib is missing or cannot write this kind of file."""
    if not importlib.util.find_spec("matplotlib"):
        raise InputError("--plot needs matplotlib: python -m pip install matplotlib")
    if file.suffix not in SUFFIXES:
        raise InputError(f"--plot: the name {file} must end in {', '.join(SUFFIXES)}")


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
