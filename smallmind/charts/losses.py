"""Training and held-out loss of a run in one chart."""

from smallmind.charts.curve import Curve
from smallmind.charts.svg import Line

DOTS = 40  # evaluations up to which each is a dot
LABELS = ("step", "nats per token", "Training and held-out loss by step")  # of axes, and a title


def lines(loss: Curve, held_out: Curve) -> list[Line]:
    """Every loss faintly, their mean, and the losses on held-out text."""
    return [
        Line("every step", loss, 0, faint=True),
        Line("training loss, smoothed", smoothed(loss), 0),
        Line("held-out loss", held_out, 1, dots=len(held_out) <= DOTS),
    ]


def smoothed(curve: Curve) -> Curve:
    """Its mean over a hundredth of the run, which shows more than a terminal can."""
    return curve.smoothed(max(1, len(curve) // 100))
