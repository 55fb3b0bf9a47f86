"""Figures as SVG: for a page that has STYLE, or as a picture that needs nothing else."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from smallmind.charts.axis import format_tick, ticks
from smallmind.charts.figure import Figure, Line, Panel
from smallmind.console.table import escape

WIDTH, LEFT, RIGHT = 720, 90, 26  # with room for the larger letters of a phone
TOP, BOTTOM = 38, 46  # above each panel, and below the last one
LARGE, SMALL = 192, 76  # the heights of panels
MAX_POINTS = 500  # of a curve: more are not seen
MAX_DOTS = 40  # evaluations up to which each is a dot
MAX_NAME = 56  # letters in the legend
N_COLOURS = 6
MAX_NUMBER = 1e30  # larger ones are left out


Point = tuple[float, float]


class Geometry(NamedTuple):
    """The measures of a figure, and about how many ticks its axes have."""

    width: int = WIDTH
    left: int = LEFT
    large: int = LARGE
    small: int = SMALL
    ticks: int = 5
    has_legend: bool = True  # above the panels
    kind: str = "wide"  # the class beside "chart"


PICTURE = Geometry()

LIGHT = """--ink: #1d2433; --quiet: #5d6779; --line: #d8dde6; --page: #ffffff; --panel: #f5f7fa;
  --c0: #1f6feb; --c1: #d1480f; --c2: #1a7f37; --c3: #8250df; --c4: #9a6700; --c5: #bf3989;"""
DARK = """--ink: #e6eaf2; --quiet: #9aa5b8; --line: #343c4a; --page: #12161d; --panel: #1b212b;
  --c0: #6cb0ff; --c1: #ff9d5c; --c2: #5fd07a; --c3: #c4a1ff; --c4: #e6c35c; --c5: #ff8cc6;"""
SHAPES = """
svg.chart text { fill: var(--quiet); font: 13px system-ui, sans-serif; }
svg.chart .grid { stroke: var(--line); stroke-width: 1; }
svg.chart .curve { fill: none; stroke-width: 2; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
svg.chart .faint { stroke-width: 1; opacity: 0.35; }
svg.chart .dashed { stroke-dasharray: 7 4; }
svg.chart .name text { stroke: var(--page); stroke-width: 3; paint-order: stroke; }
""" + "".join(
    f"svg.chart .c{i} {{ stroke: var(--c{i}); }} svg.chart .dot.c{i} {{ fill: var(--c{i}); }}\n"
    f"svg.chart .name.c{i} text {{ fill: var(--c{i}); }}\n"
    for i in range(N_COLOURS)
)
# Light and dark, but light on paper; a line has the class c0 ... c5.
STYLE = f"""
:root {{ {LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
svg.chart {{ display: block; width: 100%; height: auto; overflow: visible; }}{SHAPES}"""
COLOURS = dict(re.findall(r"--(\w+): (#\w+)", LIGHT))


class Svg(str):
    """A picture as SVG that needs nothing else: write it to a file, or let a notebook show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Svg of {len(self):,} characters>"

    def _repr_svg_(self) -> str:
        return str(self)


def chart(figure: Figure, layout: Geometry = PICTURE) -> str:
    """Returns the SVG of a figure for a page that has STYLE, "" if there is nothing to draw."""
    elements, height = _drawn(figure, layout)
    return elements and (
        f'<svg class="chart {layout.kind}" viewBox="0 0 {layout.width} {height}" role="img" '
        f'aria-label="{escape(figure.title)}">{elements}</svg>'
    )


def legend(panel: Panel) -> list[tuple[str, str]]:
    """-> the classes and the name of each kind of line that is not faint; none for one line."""
    lines = [line for line in panel.lines if len(line.points) and not line.faint]
    if len(lines) < 2:
        return []
    return list(dict.fromkeys((_kind(panel, line), line.name) for line in lines))


def picture(figure: Figure) -> Svg:
    """-> the SVG of a figure on white, whatever the page is like; empty if nothing is drawn."""
    elements, height = _drawn(figure, PICTURE)
    return chart_of(elements, WIDTH, height, figure.title)


def chart_of(elements: str, width: int, height: int, title: str) -> Svg:
    """-> elements as a picture on white that needs nothing else; empty if there are none."""
    style = re.sub(r"var\(--(\w+)\)", lambda found: COLOURS[found[1]], SHAPES)
    return Svg(
        elements
        and f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}"><title>{escape(title)}</title>'
        f'<style>{style}</style><rect width="{width}" height="{height}" fill="#ffffff"/>'
        f"{elements}</svg>"
    )


def _drawn(figure: Figure, layout: Geometry) -> tuple[str, int]:
    """Returns the elements of a figure, and its height; "" if no axis can show a point of it."""
    panels = [
        replace(panel, lines=[replace(x, points=x.points.below(MAX_NUMBER)) for x in panel.lines])
        for panel in figure.panels
    ]
    figure = replace(figure, panels=[x for x in panels if any(len(y.points) for y in x.lines)])
    if not figure.panels:
        return "", 0
    parts, height = _legend(figure.panels[0]) if layout.has_legend else ([], 0)
    for panel in figure.panels:
        is_last = panel is figure.panels[-1]
        parts += _panel(figure, panel, height, is_last, layout)
        height += TOP + (layout.small if panel.is_small else layout.large) + BOTTOM * is_last
    return "".join(parts), height


def _legend(panel: Panel) -> tuple[list[str], int]:
    """-> the names of lines above all panels, and the height of that; none for a single line."""
    parts: list[str] = []
    x, y = LEFT, 16
    if not (names := legend(panel)):
        return parts, 0
    for kind, name in names:
        name = name if len(name) <= MAX_NAME else f"...{name[-MAX_NAME:]}"
        width = 40 + 10 * len(name)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + 22
        parts.append(line_of(kind, [(x, y), (x + 24, y)]))
        parts.append(text_of(x + 30, y, name))
        x += width
    return parts, y + 14


def _panel(figure: Figure, panel: Panel, top: int, is_last: bool, layout: Geometry) -> list[str]:
    """Returns the grid, the labels and the lines of a panel whose upper end is at `top`."""
    (left, right), (low, high) = figure.x_range, panel.y_range
    right = right if right > left else left + 1
    top, height = top + TOP, layout.small if panel.is_small else layout.large
    bottom, end = top + height, layout.width - RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        across = layout.left + (x - left) / (right - left) * (end - layout.left)
        return across, top + (high - y) / (high - low) * height

    parts = [text_of(2, top - 16, panel.label)]
    for tick in ticks(low, high, 3 if panel.is_small else layout.ticks):
        y = place(left, tick)[1]
        parts.append(line_of("grid", [(layout.left, y), (end, y)]))
        parts.append(text_of(layout.left - 8, y, format_tick(tick), "end"))
    if is_last:
        for tick, label in figure.x_ticks(layout.ticks):
            parts.append(text_of(place(tick, low)[0], bottom + 14, label, "middle"))
        parts.append(text_of(end, bottom + 36, figure.x_name, "end"))
    for line in sorted(panel.lines, key=lambda line: not line.faint):
        if not len(line.points):
            continue
        thin = line.points.thinned(MAX_POINTS)
        points = list(zip(figure.xs(thin), thin.values, strict=True))
        for part in _within(points, low, high):
            parts.append(line_of(_kind(panel, line), [place(*point) for point in part]))
        places = [place(*point) for point in points if low <= point[1] <= high]
        if len(points) == 1 or (line.dots and len(points) <= MAX_DOTS):
            colour = _kind(panel, line).split()[1]
            parts += [
                f'<circle class="dot {colour}" r="3" cx="{x:.1f}" cy="{y:.1f}"/>' for x, y in places
            ]
    return parts


def _within(points: Sequence[Point], low: float, high: float) -> list[list[Point]]:
    """-> the parts of a line that are between two heights, each to where it crosses one of them."""
    parts: list[list[Point]] = [[]]
    for (x, y), (next_x, next_y) in itertools.pairwise([*points, points[-1]]):
        if low <= y <= high:
            parts[-1].append((x, y))
        bounds = [z for z in (low, high) if min(y, next_y) < z < max(y, next_y)]
        for z in bounds if y < next_y else reversed(bounds):
            parts[-1].append((x + (next_x - x) * (z - y) / (next_y - y), z))
        if parts[-1] and not low <= next_y <= high:
            parts.append([])
    return [part for part in parts if part]


def _kind(panel: Panel, line: Line) -> str:
    """Returns the classes of a line: a colour for each run or, of one run, others for its dots."""
    several = any(other.run for other in panel.lines)
    colour = line.run % N_COLOURS if several else int(line.dots)
    return f"curve c{colour}" + " faint" * line.faint + " dashed" * (line.dots and several)


def line_of(kind: str, places: Sequence[tuple[float, float]]) -> str:
    """Returns a line through places, of these classes."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="{kind}" points="{points}"/>'


def text_of(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Returns a text at the height of its middle."""
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
