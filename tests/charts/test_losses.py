"""The losses of a run as lines of a chart."""

import pytest

from smallmind.charts.curve import Curve
from smallmind.charts.losses import DOTS, lines


@pytest.mark.parametrize("count", [1, 2, 6, 99, 100, 1000])
def test_the_mean_of_any_run_has_every_step_and_stays_between_its_losses(count):
    loss = Curve(range(count), range(count), [3.0 + (-1) ** i for i in range(count)])
    every, mean, _ = lines(loss, Curve())
    assert mean.points.steps == every.points.steps == loss.steps
    assert all(2 <= value <= 4 for value in mean.points.values)
    assert count >= 200 or mean.points.values == loss.values


def test_few_evaluations_are_dots():
    few, many = (Curve(range(n), range(n), [1.0] * n) for n in (DOTS, DOTS + 1))
    assert lines(Curve(), few)[-1].dots and not lines(Curve(), many)[-1].dots
