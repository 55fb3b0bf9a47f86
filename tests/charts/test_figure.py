"""Figures of runs, and their pictures."""

import pytest

from smallmind.charts.curve import Curve
from smallmind.charts.figure import Line, Panel, losses_of
from smallmind.charts.svg import MAX_DOTS, picture


@pytest.mark.parametrize("count", [1, 2, 6, 99, 100, 1000])
def test_the_mean_of_any_run_has_every_step_and_stays_between_its_losses(count):
    loss = Curve(range(count), range(count), [3.0 + (-1) ** i for i in range(count)])
    every, mean, _ = losses_of(loss, Curve()).panels[0].lines
    assert mean.points.steps == every.points.steps == loss.steps
    assert all(2 <= value <= 4 for value in mean.points.values)
    assert count >= 200 or mean.points.values == loss.values


def test_few_evaluations_are_dots():
    few, many = (Curve(range(n), range(n), [1.0] * n) for n in (MAX_DOTS, MAX_DOTS + 1))
    assert picture(losses_of(Curve(), few)).count("<circle") == MAX_DOTS
    assert "<circle" not in picture(losses_of(Curve(), many))


def test_the_range_is_that_of_the_mean_and_of_all_dots():
    mean, dots = Curve([1, 2], [1, 2], [3.0, 4.0]), Curve([2], [2], [9.0])
    spiked = Line("raw", Curve([1, 2], [1, 2], [3.0, 5000.0]), faint=True)
    low, high = Panel("", "", [spiked, Line("mean", mean), Line("", dots, dots=True)]).y_range
    assert 2.5 < low < 3 and 9 < high < 10
    assert Panel("", "", [Line("mean", mean)], from_zero=True).y_range[0] == 0
    low, high = Panel("", "", [Line("flat", Curve([1, 2], [1, 2], [2.0, 2.0 + 1e-15]))]).y_range
    assert low < 2 < high and high - low > 0.1
