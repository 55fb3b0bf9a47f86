"""A roofline (Williams et al. 2009): operations per second of kernels over their intensity."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from smallmind.charts.axis import format_tick
from smallmind.charts.svg import N_COLOURS, WIDTH, Svg, chart_of, line_of, text_of
from smallmind.console.table import escape

TITLE = "Roofline of kernels"
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 66, 110, 24, 46
FEW_POINTS, MORE = 15, 12  # above so many the picture is higher, by so much for each
LETTER, LINE, GAP = 7.4, 14, 7  # the width of a letter, the height of a line, and beside a dot
SAME = 1.05  # times a peak, up to which another one has the same line
STEPS = 2000  # places above and below a point at which its name may stand


class Point(NamedTuple):
    """A kernel: its name, operations per byte, operations per second, and its shape."""

    name: str
    intensity: float
    rate: float
    about: str = ""


def roofline(
    points: Sequence[Point], peaks: Mapping[str, float], bandwidths: Mapping[str, float]
) -> Svg:
    """-> a picture on two logarithmic axes; "" if no point has operations.

    A kernel cannot be above the lines: the rate of its arithmetic, and its bytes at the rate of
    where they come from. `peaks` are operations, `bandwidths` bytes per second, each by name.
    """
    elements, height = _elements(points, peaks, bandwidths)
    return chart_of(elements, WIDTH, height, TITLE)


def roofline_chart(
    points: Sequence[Point], peaks: Mapping[str, float], bandwidths: Mapping[str, float]
) -> str:
    """Returns the same for a page that has STYLE."""
    elements, height = _elements(points, peaks, bandwidths)
    return elements and (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{TITLE}">'
        f"{elements}</svg>"
    )


def _elements(
    points: Sequence[Point], peaks: Mapping[str, float], bandwidths: Mapping[str, float]
) -> tuple[str, int]:
    """Returns what is drawn, and its height; "" if there is nothing to draw."""
    shown = [x for x in points if min(x.intensity, x.rate) > 0 and math.isfinite(x.rate)]
    peaks, bandwidths = ({k: v for k, v in x.items() if v > 0} for x in (peaks, bandwidths))
    if not shown or not peaks or not bandwidths:
        return "", 0
    height = HEIGHT + MORE * max(0, len(shown) - FEW_POINTS)
    ridge = max(peaks.values()) / min(bandwidths.values())
    left, right = _decades([ridge, *(x.intensity for x in shown)])
    low, high = _decades([*peaks.values(), *(x.rate for x in shown)])

    def place(intensity: float, rate: float) -> tuple[float, float]:
        across = (math.log10(intensity) - left) / (right - left)
        up = (math.log10(rate) - low) / (high - low)
        x, y = WIDTH - RIGHT - LEFT, height - BOTTOM - TOP
        return LEFT + across * x, TOP + (1 - up) * y

    parts = []
    for power in range(left, right + 1):
        x, bottom = place(10.0**power, 10.0**low)
        parts.append(line_of("grid", [(x, TOP), (x, bottom)]))
        parts.append(text_of(x, bottom + 14, format_tick(10.0**power), "middle"))
    for power in range(low, high + 1):
        _, y = place(10.0**left, 10.0**power)
        parts.append(line_of("grid", [(LEFT, y), (WIDTH - RIGHT, y)]))
        parts.append(text_of(LEFT - 8, y, format_tick(10.0 ** (power - 9)), "end"))
    parts.append(text_of(2, 10, "GFLOP/s"))
    parts.append(text_of(WIDTH - RIGHT, height - 10, "FLOP per byte", "end"))
    top = max(peaks.values())
    for name, rate in bandwidths.items():
        begin = max(10.0**left, 10.0**low / rate)
        end = min(top / rate, 10.0**right)
        ends = [place(begin, rate * begin), place(end, rate * end)]
        parts.append(line_of("curve c0", ends))
        (x, y), label = ends[0], f"{name}, {rate / 1e9:,.0f} GB/s"
        slope = math.degrees(math.atan2(ends[1][1] - y, ends[1][0] - x))
        turned = f'<g transform="translate({x:.1f} {y:.1f}) rotate({slope:.1f})">'
        parts.append(f"{turned}{text_of(3 * GAP, -GAP - 2, label)}</g>")
    shared: dict[float, str] = {}  # kinds of numbers whose products are as fast, within a pixel
    for name, rate in sorted(peaks.items(), key=lambda peak: peak[1]):
        near = next((x for x in shared if rate < SAME * x), rate)
        shared[near] = f"{shared[near]}, {name}" if near in shared else name
    taken = []  # left and right ends of what no name may cross, and its height
    for rate, name in shared.items():
        begin = min(rate / max(bandwidths.values()), 10.0**right)
        ends = [place(begin, rate), place(10.0**right, rate)]
        parts.append(line_of("curve c0", ends))
        (x, y), (right_end, _) = ends
        parts.append(text_of(right_end, y - 10, f"{name}: {rate / 1e9:,.0f}", "end"))
        taken += [(x, right_end, y), (x, right_end, y - 10)]
    places = [place(x.intensity, x.rate) for x in shown]
    return "".join([*parts, *_named(shown, places, height - BOTTOM, taken)]), height


def _named(
    points: Sequence[Point],
    places: Sequence[tuple[float, float]],
    bottom: int,
    lines: Iterable[tuple[float, float, float]],
) -> Iterable[str]:
    """Yields a dot for each point, and its name beside it where there is no other name or line."""
    taken = [*lines, *((x - 4, x + 4, y) for x, y in places)]
    for number, (point, (x, y)) in enumerate(sorted(zip(points, places, strict=True))):
        own, width = (x - 4, x + 4, y), LETTER * len(point.name)
        sides = [x + GAP] if x + GAP + width <= WIDTH else []
        sides += [x - GAP - width] if x - GAP - width >= LEFT else []

        def is_free(begin: float, level: float, own: Any = own, width: float = width) -> bool:
            return TOP < level < bottom and not any(
                abs(level - other) < LINE and begin < right + GAP and left < begin + width + GAP
                for left, right, other in taken
                if (left, right, other) != own
            )

        begin, free = next(
            (
                (side, level)
                for step in range(STEPS)
                for level in (y - step, y + step)
                for side in sides
                if is_free(side, level)
            ),
            (min(x + GAP, WIDTH - width), y),
        )
        taken.append((begin, begin + width, free))
        colour = f"c{1 + number % (N_COLOURS - 1)}"
        if abs(free - y) > LINE:
            yield line_of(
                f"curve {colour} faint", [(x, y), (max(begin, min(x, begin + width)), free)]
            )
        title = f"<title>{escape(f'{point.name} {point.about}')}</title>"
        yield f'<circle class="dot {colour}" r="4" cx="{x:.1f}" cy="{y:.1f}">{title}</circle>'
        is_left = begin < x
        place, anchor = (begin + width, "end") if is_left else (begin, "start")
        named = text_of(place, free, point.name, anchor)
        yield f'<g class="name {colour}">{named}</g>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Returns the powers of ten around values."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values) * 1.05))
