"""Histograms: how many numbers are in each of some equal ranges, as the outline of bars."""

import math
from collections.abc import Iterable, Mapping

from smallmind.charts.curve import Curve
from smallmind.charts.figure import Figure, Line, Panel


def histogram(
    title: str, values: Mapping[str, Iterable[float]], unit: str = "value", bins: int = 40
) -> Figure:
    """Named numbers -> their histograms over one axis, as shares of each; others are left out."""
    finite = {name: [x for x in map(float, numbers) if math.isfinite(x)] for name, numbers in
              values.items()}  # fmt: skip
    every = [x for numbers in finite.values() for x in numbers] or [0.0]
    low, high = min(every), max(every)
    width = (high - low) / bins or 1.0
    edges = [low + width * i for i in range(bins + 1)]
    lines = []
    for run, (name, numbers) in enumerate(finite.items()):
        counts = [0] * bins
        for x in numbers:
            counts[min(bins - 1, int((x - low) / width))] += 1
        shares = [count / max(1, len(numbers)) for count in counts]
        xs = [edge for edge in edges for _ in range(2)]
        heights = [0.0, *(share for share in shares for _ in range(2)), 0.0]
        lines.append(Line(name, Curve(range(len(xs)), xs, heights), run))
    panel = Panel("share in each range", "", lines, from_zero=True, shows_all=True)
    return Figure(title, [panel], unit, seconds=1.0)
