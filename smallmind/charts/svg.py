"""Line charts as SVG: for a page that has STYLE, or as a picture that needs nothing else."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from smallmind.charts.axis import format_tick, ticks, worth_seeing
from smallmind.charts.curve import Curve
from smallmind.console.table import escape

WIDTH, HEIGHT = 720, 270
LEFT, RIGHT, TOP, BOTTOM = 90, 26, 32, 46  # with room for the larger letters of a phone
TICKS = 5
POINTS = 500  # of a curve at most: more are not seen
COLOURS = 6
LARGEST = 1e30  # larger numbers are left out

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
svg.chart .dashed { stroke-dasharray: 6 4; }
""" + "".join(
    f"svg.chart .c{i} {{ stroke: var(--c{i}); }} svg.chart .dot.c{i}, .key.c{i} "
    f"{{ fill: var(--c{i}); background: var(--c{i}); }}\n"
    for i in range(COLOURS)
)
# Light and dark, but light on paper; a line has the class c0 ... c5.
STYLE = f"""
:root {{ {LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
svg.chart {{ display: block; width: 100%; height: auto; overflow: visible; }}{SHAPES}"""
LEGEND = 22  # the height of a row of a picture's legend


class Svg(str):
    """A picture as SVG that needs nothing else: write it to a file, or let a notebook show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Svg of {len(self):,} characters>"

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Line:
    """A curve and how it is drawn."""

    name: str
    points: Curve
    colour: int = 0
    faint: bool = False  # behind the others, and not in the legend
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """Lines over one axis, which is `axis` of their curves; without ranges those worth seeing."""

    lines: Sequence[Line]
    x_label: str
    y_label: str
    axis: str = "steps"
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    from_zero: bool = False


def chart(
    lines: Sequence[Line], x_label: str, y_label: str, title: str, from_zero: bool = False
) -> str:
    """The SVG of lines over one axis, "" if there is nothing to draw; title is read aloud."""
    if not (elements := _elements(Axes(lines, x_label, y_label, from_zero=from_zero))):
        return ""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{elements}</svg>'
    )


def picture(panels: Sequence[Axes], title: str) -> Svg:
    """Returns panels below each other and a legend, on white; empty if nothing is drawn."""
    drawn = [elements for panel in panels if (elements := _elements(panel))]
    if not drawn:
        return Svg()
    colours = dict(re.findall(r"--(\w+): (#\w+)", LIGHT))
    style = re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], SHAPES)
    names: dict[str, Line] = {}
    for panel in panels:
        for line in panel.lines:
            if line.name and not line.faint and len(_drawable(line.points, panel.axis)):
                names.setdefault(line.name, line)
    keys, x, y = [], LEFT, 10
    for name, line in names.items():
        width = 50 + 7 * len(name)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + LEGEND
        keys.append(
            f'<rect class="key c{line.colour % COLOURS}" x="{x}" y="{y}" width="12" '
            f'height="12" rx="3"/><text x="{x + 18}" y="{y + 11}">{escape(name)}</text>'
        )
        x += width
    top = y + LEGEND - 2 if keys else 0
    body = "".join(
        f'<g transform="translate(0 {top + HEIGHT * number})">{elements}</g>'
        for number, elements in enumerate(drawn)
    )
    height = top + HEIGHT * len(drawn)
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}"><title>{escape(title)}</title><style>{style}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>{"".join(keys)}{body}</svg>'
    )


def _elements(axes: Axes) -> str:
    """The grid, the labels and the lines of a chart; "" without lines."""
    drawn = [(x, points) for x in axes.lines if len(points := _drawable(x.points, axes.axis))]
    if not drawn:
        return ""
    places = [x for _, points in drawn for x in points.xs(axes.axis)]
    left, right = axes.x_range or (min(places), max(places))
    values = [value for _, points in drawn for value in points.values]
    low, high = axes.y_range or _range(values)
    low = 0.0 if axes.from_zero else low
    high = high if high > low else low + 1
    if left == right:
        left, right = left - 0.5, right + 0.5

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        down = TOP + (high - min(max(y, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = []
    for tick in ticks(low, high, TICKS):
        y = place(left, tick).split(",")[1]
        parts.append(f'<path class="grid" d="M{LEFT},{y} H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y}" dy="0.32em" text-anchor="end">{format_tick(tick)}</text>'
        )
    for tick in ticks(left, right, TICKS):
        x = place(tick, low).split(",")[0]
        bottom = HEIGHT - BOTTOM + 18
        parts.append(f'<text x="{x}" y="{bottom}" text-anchor="middle">{format_tick(tick)}</text>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">'
        f'{escape(axes.x_label)}</text><text x="2" y="16">{escape(axes.y_label)}</text>'
    )
    for line, points in sorted(drawn, key=lambda item: not item[0].faint):
        colour = f"c{line.colour % COLOURS}"
        thin = points.thinned(POINTS)
        spots = [place(*point) for point in zip(thin.xs(axes.axis), thin.values, strict=True)]
        kind = f"curve {'faint ' * line.faint}{'dashed ' * line.dashed}{colour}"
        parts.append(f'<polyline class="{kind}" points="{" ".join(spots)}"/>')
        if line.dots or len(spots) == 1:
            dots = [spot.split(",") for spot in spots]
            parts += [f'<circle class="dot {colour}" r="3" cx="{x}" cy="{y}"/>' for x, y in dots]
    return "".join(parts)


def _drawable(curve: Curve, axis: str) -> Curve:
    """Without points that no axis can show: NaN, Inf, and numbers beyond LARGEST."""
    place = 1 if axis == "time" else 0
    triples = zip(curve.steps, curve.seconds, curve.values, strict=True)
    kept = [point for point in triples if abs(point[place]) < LARGEST and abs(point[2]) < LARGEST]
    return Curve([p[0] for p in kept], [p[1] for p in kept], [p[2] for p in kept])


def _range(values: list[float]) -> tuple[float, float]:
    """What is worth seeing, with a margin."""
    low, high = worth_seeing(values)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return low - margin, high + margin
