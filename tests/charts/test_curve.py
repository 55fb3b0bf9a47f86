"""Curves: what a rollback removes, values between points, means, and fewer points."""

import math

import pytest

from smallmind.charts.curve import Curve


def line(count, value=float):
    return Curve(range(count), [step / 2 for step in range(count)], map(value, range(count)))


def test_a_step_that_is_written_again_replaces_all_that_came_after():
    curve = line(10)
    curve.add(6, 9.0, 0.25)
    assert curve.steps == [*range(6), 6] and curve.values[-1] == 0.25 and curve.seconds[-1] == 9.0
    curve.cut(2)
    assert curve.steps == [0, 1, 2] and len(curve.values) == len(curve.seconds) == 3


@pytest.mark.parametrize(
    ("x", "axis", "value"),
    [
        (0, "steps", 0.0),
        (2.5, "steps", 5.0),
        (9, "steps", 18.0),
        (4.25, "time", 17.0),
        (-1, "steps", None),
        (9.5, "steps", None),
    ],
)
def test_values_between_points_are_on_a_straight_line(x, axis, value):
    assert line(10, lambda n: 2.0 * n).at(x, axis) == value
    assert Curve().at(x, axis) is None


def test_a_mean_has_no_bias_towards_its_start_and_skips_what_is_not_finite():
    curve = Curve(range(100), range(100), [3.0, math.nan, *[3.0] * 98])
    assert curve.smoothed(20).values == pytest.approx([3.0] * 100)
    noisy = Curve(range(1000), range(1000), [2.0 + (-1) ** n for n in range(1000)])
    assert max(noisy.smoothed(50).values[200:]) < 2.1
    assert noisy.smoothed(1).values == noisy.values
    assert math.isnan(Curve([1], [1.0], [math.nan]).smoothed().values[0])


def test_fewer_points_keep_every_peak_and_both_ends():
    curve = line(10_000, lambda n: math.sin(n / 50))
    curve.values[1234], curve.values[7777] = 9.0, -9.0
    thin = curve.thinned(100)
    assert len(thin) <= 100 and max(thin.values) == 9.0 and min(thin.values) == -9.0
    assert thin.steps[0] == 0 and thin.steps[-1] == 9999 and thin.steps == sorted(thin.steps)
    assert curve.thinned(10_000) is curve


def test_points_that_no_scale_shows_are_left_out():
    curve = Curve([1, 2, 3, 4], [0.1, 0.2, math.nan, 0.4], [1.0, math.inf, 3.0, 4.0])
    assert curve.finite().steps == [1, 4]
    assert line(3).finite().values == [0.0, 1.0, 2.0]
