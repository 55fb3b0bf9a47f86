"""The range of an axis, round numbers on it, and how they are written."""

import math
from collections.abc import Iterable, Sequence

STEEP_SHARE = 0.05  # the share of a curve that an axis may leave out


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns at most about count round numbers from low to high."""
    extent = high - low
    if not 0 < extent < math.inf:
        return [low]
    size = 10.0 ** math.floor(math.log10(extent / max(1, count)))
    step = next(s * size for s in (1, 2, 5, 10) if extent / (s * size) <= max(1, count))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def format_tick(value: float) -> str:
    """Returns a round number, briefly: 0, 0.5, 1,500, 2e-05."""
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.6g}" if abs(value) < 1e5 else f"{value:,.0f}"


def worth_seeing(values: Sequence[float], others: Iterable[float] = ()) -> tuple[float, float]:
    """-> the range of values, without a steep start or single spikes, and of all others."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int((1 - STEEP_SHARE) * (len(ordered) - 1))]
    if high - low > 4 * (usual - low) > 0:
        high = usual + (usual - low)
    return min(low, *others, low), max(high, *others, high)
