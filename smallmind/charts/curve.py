"""A curve of a run: one number over its steps and seconds."""

import bisect
import math
from collections.abc import Sequence

AXES = ("steps", "time")
SHARE_SMOOTHED = 0.01  # of a curve, over which `smoothed` averages by default


class Curve:
    """A number at some steps, in ascending order, and the seconds of training until then."""

    def __init__(
        self,
        steps: Sequence[int] = (),
        seconds: Sequence[float] = (),
        values: Sequence[float] = (),
    ) -> None:
        self.steps, self.seconds, self.values = list(steps), list(seconds), list(values)

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, seconds: float, value: float) -> None:
        """Appends a point. Later ones go: the run was set back, and writes these steps again."""
        if self.steps and self.steps[-1] >= step:
            self.cut(step - 1)
        self.steps.append(step)
        self.seconds.append(seconds)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Removes what comes after a step."""
        end = bisect.bisect_right(self.steps, step)
        del self.steps[end:], self.seconds[end:], self.values[end:]

    def xs(self, axis: str) -> Sequence[float]:
        """Returns its places on one of AXES."""
        return self.seconds if axis == "time" else self.steps

    def finite(self) -> "Curve":
        """Leaves out points that are not finite: no scale shows them."""
        is_finite = all(map(math.isfinite, self.values)) and all(map(math.isfinite, self.seconds))
        return self if is_finite else self.below(math.inf)

    def below(self, limit: float) -> "Curve":
        """Leaves out points that have a NaN, or a number that is not below the limit in size."""
        points = zip(self.steps, self.seconds, self.values, strict=True)
        found = [point for point in points if all(abs(number) < limit for number in point)]
        return Curve(*zip(*found, strict=True)) if found else Curve()

    def at(self, x: float, axis: str = "steps") -> float | None:
        """-> the value at a place, between two points on a straight line; None outside of them."""
        xs = self.xs(axis)
        right = bisect.bisect_left(xs, x)
        if right == len(xs) or (right == 0 and xs[0] != x):
            return None
        if xs[right] == x:
            return self.values[right]
        left = right - 1
        share = (x - xs[left]) / (xs[right] - xs[left])
        return self.values[left] + share * (self.values[right] - self.values[left])

    def smoothed(self, points: int | None = None) -> "Curve":
        """Returns each value as a mean of about `points` up to it, by default a hundredth of all.

        An exponential mean without the bias towards its start (Kingma and Ba 2014, section 3).
        """
        points = max(1, round(SHARE_SMOOTHED * len(self))) if points is None else points
        decay = 1 - 2 / (points + 1)
        mean, weight, values = 0.0, 0.0, []
        for value in self.values:
            if math.isfinite(value):
                mean = decay * mean + (1 - decay) * value
                weight = decay * weight + (1 - decay)
            values.append(mean / weight if weight else math.nan)
        return Curve(self.steps, self.seconds, values)

    def thinned(self, points: int) -> "Curve":
        """-> at most about this many points: both ends, the extremes of each range."""
        count = len(self)
        if count <= points:
            return self
        ranges = max(1, points // 2 - 1)
        chosen = {0, count - 1}
        for part in range(ranges):
            indices = range(count * part // ranges, count * (part + 1) // ranges)
            chosen.add(min(indices, key=self.values.__getitem__))
            chosen.add(max(indices, key=self.values.__getitem__))
        found = [(self.steps[i], self.seconds[i], self.values[i]) for i in sorted(chosen)]
        return Curve(*zip(*found, strict=True))
