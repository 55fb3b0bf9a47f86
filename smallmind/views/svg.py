"""Line charts as SVG, for a page that says what the classes look like: see STYLE."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from smallmind.views.axis import format_tick, ticks
from smallmind.views.curve import Curve

WIDTH, HEIGHT = 720, 270
LEFT, RIGHT, TOP, BOTTOM = 80, 16, 14, 46
TICKS = 5
POINTS = 500  # of a curve at most: more are not seen
COLOURS = 6
LARGEST = 1e30  # larger numbers are left out

# Light and dark; a curve has the class c0 ... c5.
STYLE = """
:root { --ink: #1d2433; --quiet: #5d6779; --line: #d8dde6; --page: #ffffff; --panel: #f5f7fa;
  --c0: #1f6feb; --c1: #d1480f; --c2: #1a7f37; --c3: #8250df; --c4: #9a6700; --c5: #bf3989; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf2; --quiet: #9aa5b8; --line: #343c4a;
  --page: #12161d; --panel: #1b212b; --c0: #6cb0ff; --c1: #ff9d5c; --c2: #5fd07a; --c3: #c4a1ff;
  --c4: #e6c35c; --c5: #ff8cc6; } }
svg.chart { display: block; width: 100%; height: auto; }
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


@dataclass(frozen=True)
class Line:
    """y over x, both of one length; values that are not finite are left out."""

    name: str
    x: Sequence[int]
    y: Sequence[float]
    colour: int = 0
    faint: bool = False  # behind the others, and not in the legend
    dots: bool = False


def chart(
    curves: Sequence[Line], x_label: str, y_label: str, title: str, from_zero: bool = False
) -> str:
    """The SVG of curves over one axis, "" if there is nothing to draw; title is read aloud."""
    drawn = [(curve, x, y) for curve in curves for x, y in [_finite(curve)] if x]
    if not drawn:
        return ""
    left: float = min(min(x) for _, x, _ in drawn)
    right: float = max(max(x) for _, x, _ in drawn)
    low, high = _range([value for _, _, y in drawn for value in y])
    low = 0.0 if from_zero else low
    high = high if high > low else low + 1
    if left == right:
        left, right = left - 0.5, right + 0.5

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        down = TOP + (high - min(max(y, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}">'
    ]
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
        f'{html.escape(x_label)}</text><text x="2" y="{HEIGHT - 4}">{html.escape(y_label)}</text>'
    )
    for curve, xs, ys in sorted(drawn, key=lambda item: not item[0].faint):
        colour = f"c{curve.colour % COLOURS}"
        thin = Curve(xs, xs, ys).thinned(POINTS)
        points = [place(*point) for point in zip(thin.steps, thin.values, strict=True)]
        kind = f"curve {'faint ' * curve.faint}{colour}"
        parts.append(f'<polyline class="{kind}" points="{" ".join(points)}"/>')
        if curve.dots or len(points) == 1:
            parts += [
                f'<circle class="dot {colour}" r="3" cx="{point.split(",")[0]}" '
                f'cy="{point.split(",")[1]}"/>'
                for point in points
            ]
    return "".join([*parts, "</svg>"])


def _finite(curve: Line) -> tuple[list[int], list[float]]:
    pairs = [
        (x, y)
        for x, y in zip(curve.x, curve.y, strict=True)
        if abs(x) < LARGEST and abs(y) < LARGEST  # not of NaN
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _range(values: list[float]) -> tuple[float, float]:
    """What the axis shows: all of it, but not the first steep part nor single spikes."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    if high - low > 4 * (usual - low) > 0:
        high = usual + (usual - low)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return low - margin, high + margin
