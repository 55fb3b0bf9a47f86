"""Curves drawn with characters: braille dots, or ASCII where the console has no braille."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from smallmind.charts.axis import format_tick, ticks
from smallmind.charts.curve import Curve
from smallmind.charts.figure import Figure, Panel

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-:=+*#"
FRAME = "┤│└┬─"  # the axes: a tick, the side, the corner, a tick below, the bottom
ASCII_FRAME = "||++-"
BRAILLE = 0x2800
# The bit of each dot of a braille character, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
HALVES = (" ", "'", ".", ":")  # what ASCII has: nothing, the upper half, the lower half, both
APART = 4  # columns between marks
GUTTER = 7  # columns for the labels of y axes
SAMPLES = BLOCKS + FRAME + chr(BRAILLE) + chr(BRAILLE + 0xFF)  # what a console must print


class Series(NamedTuple):
    """Points to draw: as a line, or if there is a mark as that character at each of them."""

    xs: Sequence[float]
    ys: Sequence[float]
    mark: str = ""


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Values in order, as a line of blocks of eight heights, at most width characters.

    Each is the mean of as many neighbours as it takes. Values that are not finite are left out.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(bounds)]
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    low, extent = min(means), max(means) - min(means)
    if not 0 < extent < math.inf:
        return blocks[0] * count
    return "".join(blocks[min(7, int(8 * (mean - low) / extent))] for mean in means)


def draw(
    figure: Figure,
    panel: Panel,
    width: int,
    height: int,
    ascii_only: bool = False,
    has_labels: bool = True,
    marks: str = "o",
) -> str:
    """A panel of a figure without its title; `marks` has a character for each run.

    A run is marked at its dots or, if there are several runs and it has none, at one place.
    """

    def series(curve: Curve, mark: str = "") -> Series:
        return Series(figure.xs(curve), curve.values, mark)

    shown = [line for line in panel.lines if len(line.points) and not line.faint]
    drawn = [series(line.points.thinned(4 * width)) for line in shown if not line.dots]
    for run, mark in enumerate(marks):
        dots = [line.points for line in shown if line.dots and line.run == run]
        lines = [line.points for line in shown if not line.dots and line.run == run]
        if dots:  # not too close, from the last one back
            every = -(-len(dots[0]) * APART // width)
            xs, ys, _ = series(dots[0])
            drawn.append(Series(xs[::-every], ys[::-every], mark))
        elif lines and len(marks) > 1:  # for each run at another place
            place = len(lines[0]) * (run + 1) // (len(marks) + 1)
            xs, ys, _ = series(lines[0])
            drawn.append(Series(xs[place : place + 1], ys[place : place + 1], mark))
    x_range, y_range = figure.x_range, panel.y_range
    return plot(drawn, width, height, ascii_only, x_range, has_labels, GUTTER, y_range)


def plot(
    series: Sequence[Series],
    width: int,
    height: int,
    ascii_only: bool = False,
    x_range: tuple[float, float] | None = None,
    has_labels: bool = True,
    gutter: int = 0,
    y_range: tuple[float, float] | None = None,
) -> str:
    """A panel of height rows and its axes, width columns in all; later series cover earlier ones.

    Panels stand below each other if they have the same x_range and the same gutter, in which the
    labels of the y axis are. Without has_labels the x axis has none. Points must be finite; those
    outside of a y_range are on its edges.
    """
    xs = [x for s in series for x in s.xs] or [0.0]
    ys = [y for s in series for y in s.ys] or [0.0]
    x_range = _widened(*(x_range or (min(xs), max(xs))))
    y_range = _widened(*(y_range or (min(ys), max(ys))))
    marked = {
        _place(y, *y_range, height): format_tick(y) for y in ticks(*y_range, max(3, height // 2))
    }
    gutter = max([gutter, *map(len, marked.values())])
    tick, side, corner, down, bottom = list(ASCII_FRAME if ascii_only else FRAME)
    canvas = _Canvas(max(8, width - gutter - 2), height, x_range, y_range, ascii_only)
    for s in series:
        canvas.add(s)
    lines = []
    for row, drawn in enumerate(canvas.rows()):
        label = marked.get(height - 1 - row, "")
        lines.append(f"{label:>{gutter}} {tick if label else side}{drawn}".rstrip())
    places = {
        _place(x, *x_range, canvas.width): format_tick(x)
        for x in ticks(*x_range, max(1, canvas.width // 14))
    }
    axis = "".join(down if column in places else bottom for column in range(canvas.width))
    lines.append(f"{'':{gutter}} {corner}{axis}")
    if has_labels:
        lines.append(" " * (gutter + 2) + _labels(places, canvas.width))
    return "\n".join(lines)


def _labels(places: dict[int, str], width: int) -> str:
    """Labels centred at columns, as far as they fit."""
    line = ""
    for column, label in sorted(places.items()):
        start = max(0, min(column - len(label) // 2, width - len(label)))
        if start > len(line) or not line:
            line = line.ljust(start) + label
    return line


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that has an extent, also if its ends only differ by rounding."""
    scale = max(abs(low), abs(high))
    if high - low > 1e-9 * scale:
        return low, high
    return low - (scale / 2 or 0.5), high + (scale / 2 or 0.5)


def _place(value: float, low: float, high: float, count: int) -> int:
    """Which of count places from low to high a value is in, from 0."""
    return min(count - 1, max(0, int((value - low) / (high - low) * count)))


class _Canvas:
    """A grid of dots, several to a character, and of marks over them."""

    def __init__(
        self,
        width: int,
        height: int,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        ascii_only: bool,
    ) -> None:
        self.width = width
        self.height = height
        self.x_range = x_range
        self.y_range = y_range
        self.ascii_only = ascii_only
        self.across, self.down = (1, 2) if ascii_only else (2, 4)  # dots to a character
        self.dots = [[0] * width for _ in range(height)]  # their bits
        self.marks: dict[tuple[int, int], str] = {}  # row and column

    def add(self, series: Series) -> None:
        """Draws a series."""
        if series.mark:
            for x, y in zip(series.xs, series.ys, strict=True):
                column = _place(x, *self.x_range, self.width)
                row = self.height - 1 - _place(y, *self.y_range, self.height)
                self.marks[row, column] = series.mark
            return
        before: tuple[int, int] | None = None
        for x, y in zip(series.xs, series.ys, strict=True):
            dot = (
                _place(x, *self.x_range, self.width * self.across),
                _place(y, *self.y_range, self.height * self.down),
            )
            self._line(before or dot, dot)
            before = dot

    def rows(self) -> list[str]:
        """The characters, from the top."""
        shown = []
        for row, bits in enumerate(self.dots):
            line = [HALVES[b] if self.ascii_only else chr(BRAILLE + b) if b else " " for b in bits]
            shown.append("".join(self.marks.get((row, i), char) for i, char in enumerate(line)))
        return shown

    def _line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """The dots on a straight line."""
        count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for i in range(count + 1):
            x = start[0] + round((end[0] - start[0]) * i / count)
            y = start[1] + round((end[1] - start[1]) * i / count)
            below = self.height * self.down - 1 - y  # from the top
            row, column = below // self.down, x // self.across
            dot = below % self.down, x % self.across
            self.dots[row][column] |= 1 << dot[0] if self.ascii_only else DOTS[dot[0]][dot[1]]
