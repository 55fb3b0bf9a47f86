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
LEGEND = 30  # the height of a picture's legend


class Svg(str):
    """A picture as SVG that needs nothing else: write it to a file, or let a notebook show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Svg of {len(self):,} characters>"

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Line:
    """A curve over its steps."""

    name: str
    points: Curve
    colour: int = 0
    faint: bool = False  # behind the others, and not in the legend
    dots: bool = False


def chart(
    lines: Sequence[Line], x_label: str, y_label: str, title: str, from_zero: bool = False
) -> str:
    """The SVG of lines over one axis, "" if there is nothing to draw; title is read aloud."""
    if not (elements := _elements(lines, x_label, y_label, from_zero)):
        return ""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{elements}</svg>'
    )


def picture(lines: Sequence[Line], x_label: str, y_label: str, title: str) -> Svg:
    """Adds a legend, on white whatever the page is like; empty if nothing is drawn."""
    if not (elements := _elements(lines, x_label, y_label)):
        return Svg()
    colours = dict(re.findall(r"--(\w+): (#\w+)", LIGHT))
    style = re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], SHAPES)
    keys, x = [], LEFT
    for line in lines:
        if not line.faint and len(_drawable(line.points)):
            keys.append(
                f'<rect class="key c{line.colour % COLOURS}" x="{x}" y="10" width="12" '
                f'height="12" rx="3"/><text x="{x + 18}" y="21">{escape(line.name)}</text>'
            )
            x += 50 + 7 * len(line.name)
    height = HEIGHT + LEGEND
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}"><title>{escape(title)}</title><style>{style}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>{"".join(keys)}'
        f'<g transform="translate(0 {LEGEND})">{elements}</g></svg>'
    )


def _elements(lines: Sequence[Line], x_label: str, y_label: str, from_zero: bool = False) -> str:
    """The grid, the labels and the lines of a chart; "" without lines."""
    drawn = [(line, points) for line in lines if len(points := _drawable(line.points))]
    if not drawn:
        return ""
    left: float = min(points.steps[0] for _, points in drawn)
    right: float = max(points.steps[-1] for _, points in drawn)
    low, high = _range([value for _, points in drawn for value in points.values])
    low = 0.0 if from_zero else low
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
        f'{escape(x_label)}</text><text x="2" y="16">{escape(y_label)}</text>'
    )
    for line, points in sorted(drawn, key=lambda item: not item[0].faint):
        colour = f"c{line.colour % COLOURS}"
        thin = points.thinned(POINTS)
        places = [place(*point) for point in zip(thin.steps, thin.values, strict=True)]
        kind = f"curve {'faint ' * line.faint}{colour}"
        parts.append(f'<polyline class="{kind}" points="{" ".join(places)}"/>')
        if line.dots or len(places) == 1:
            dots = [spot.split(",") for spot in places]
            parts += [f'<circle class="dot {colour}" r="3" cx="{x}" cy="{y}"/>' for x, y in dots]
    return "".join(parts)


def _drawable(curve: Curve) -> Curve:
    """Without points that no axis can show: NaN, Inf, and numbers beyond LARGEST."""
    triples = zip(curve.steps, curve.seconds, curve.values, strict=True)
    kept = [point for point in triples if abs(point[0]) < LARGEST and abs(point[2]) < LARGEST]
    return Curve([p[0] for p in kept], [p[1] for p in kept], [p[2] for p in kept])


def _range(values: list[float]) -> tuple[float, float]:
    """The range worth seeing, with a margin."""
    low, high = worth_seeing(values)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return low - margin, high + margin
