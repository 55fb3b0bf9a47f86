"""Curves drawn with characters: braille dots, or ASCII where the console has no braille."""

import itertools
import math
from collections.abc import Sequence

from smallmind.charts.axis import format_tick, ticks
from smallmind.charts.figure import Figure, Panel

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-:=+*#"
FRAME = "┤│└┬─"  # the axes: a tick, the side, the corner, a tick below, the bottom
ASCII_FRAME = "||++-"
BRAILLE = 0x2800
# The bit of each dot of a braille character, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
HALVES = (" ", "'", ".", ":")  # what ASCII has: nothing, the upper half, the lower half, both
MARK_DISTANCE = 4  # columns
GUTTER = 7  # columns for the labels of y axes
SAMPLES = BLOCKS + FRAME + chr(BRAILLE) + chr(BRAILLE + 0xFF)  # what a console must print


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Draws values in order as a line of blocks of eight heights, at most width characters.

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
    marks: str = "o",
) -> str:
    """-> a panel of a figure without its title: height rows and the axis below them, width columns.

    `marks` has a character for each run, which covers its line at its dots or, if there are several
    runs and it has none, at one point. The last panel has labels below its axis.
    """
    tick, side, corner, down, bottom = list(ASCII_FRAME if ascii_only else FRAME)
    low, high = panel.y_range
    labels = {
        _place(y, low, high, height): format_tick(y) for y in ticks(low, high, max(3, height // 2))
    }
    gutter = max([GUTTER, *map(len, labels.values())])
    canvas = _Canvas(max(8, width - gutter - 2), height, figure, panel, ascii_only)
    shown = [line for line in panel.lines if len(line.points) and not line.faint]
    for line in shown:
        if not line.dots:
            thin = line.points.thinned(4 * width)
            canvas.line(list(zip(figure.xs(thin), thin.values, strict=True)))
    for run, mark in enumerate(marks):
        lines = sorted((line for line in shown if line.run == run), key=lambda line: not line.dots)
        if not lines or not (lines[0].dots or len(marks) > 1):
            continue
        points = list(zip(figure.xs(lines[0].points), lines[0].points.values, strict=True))
        index = len(points) * (run + 1) // (len(marks) + 1)
        every = -(-len(points) * MARK_DISTANCE // width)  # not too close, from the last one back
        canvas.mark(points[::-every] if lines[0].dots else points[index : index + 1], mark)
    rows = []
    for row, drawn in enumerate(canvas.rows()):
        label = labels.get(height - 1 - row, "")
        rows.append(f"{label:>{gutter}} {tick if label else side}{drawn}".rstrip())
    left, right = canvas.x_range
    places = {
        _place(x, left, right, canvas.width): format_tick(x)
        for x in ticks(left, right, max(1, canvas.width // 14))
    }
    axis = "".join(down if column in places else bottom for column in range(canvas.width))
    rows.append(f"{'':{gutter}} {corner}{axis}")
    if panel is figure.panels[-1]:
        rows.append(" " * (gutter + 2) + _labels(places, canvas.width))
    return "\n".join(rows)


def _labels(places: dict[int, str], width: int) -> str:
    """Centres labels at columns, as far as they fit."""
    line = ""
    for column, label in sorted(places.items()):
        start = max(0, min(column - len(label) // 2, width - len(label)))
        if start > len(line) or not line:
            line = line.ljust(start) + label
    return line


def _place(value: float, low: float, high: float, count: int) -> int:
    """Returns which of count places from low to high a value is in, from 0."""
    return min(count - 1, max(0, int((value - low) / (high - low) * count)))


class _Canvas:
    """A grid of dots, several to a character, and of marks over them."""

    def __init__(self, width: int, height: int, figure: Figure, panel: Panel, ascii_only: bool):
        self.width, self.height, self.ascii_only = width, height, ascii_only
        left, right = figure.x_range
        self.x_range, self.y_range = (left, max(right, left + 1)), panel.y_range
        self.across, self.down = (1, 2) if ascii_only else (2, 4)  # dots to a character
        self.dots = [[0] * width for _ in range(height)]  # their bits
        self.marks: dict[tuple[int, int], str] = {}  # row and column

    def mark(self, points: Sequence[tuple[float, float]], mark: str) -> None:
        """Puts a character at each of the points."""
        for x, y in points:
            column = _place(x, *self.x_range, self.width)
            self.marks[self.height - 1 - _place(y, *self.y_range, self.height), column] = mark

    def line(self, points: Sequence[tuple[float, float]]) -> None:
        """Draws straight lines between points, or a dot for a single one."""
        across, down = self.width * self.across, self.height * self.down
        dots = [
            (_place(x, *self.x_range, across), _place(y, *self.y_range, down)) for x, y in points
        ]
        for start, end in itertools.pairwise([dots[0], *dots]):
            count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
            for i in range(count + 1):
                x = start[0] + round((end[0] - start[0]) * i / count)
                y = start[1] + round((end[1] - start[1]) * i / count)
                (row, dot), column = divmod(down - 1 - y, self.down), x // self.across
                bit = 1 << dot if self.ascii_only else DOTS[dot][x % self.across]
                self.dots[row][column] |= bit

    def rows(self) -> list[str]:
        """Returns the characters, from the top."""
        shown = []
        for row, bits in enumerate(self.dots):
            line = [HALVES[b] if self.ascii_only else chr(BRAILLE + b) if b else " " for b in bits]
            shown.append("".join(self.marks.get((row, i), char) for i, char in enumerate(line)))
        return shown
