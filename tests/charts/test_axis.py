"""The range of an axis: what is worth seeing of a curve."""

import math

import pytest

from smallmind.charts.axis import worth_seeing


def test_the_steep_start_of_a_loss_is_left_out():
    losses = [0.5 + 3.5 * math.exp(-step / 10) + 0.5 * math.exp(-step / 100) for step in range(500)]
    low, high = worth_seeing(losses)
    assert low == min(losses) and 1 < high < 2


def test_a_spike_is_left_out():
    assert worth_seeing([*[1.0, 2.0] * 50, 1000.0]) == (1.0, 3.0)


@pytest.mark.parametrize(
    "values", [[3.0], [1.0, 2.0], [2.0, 1.0, 3.0], [1.0] * 9, [step / 10 for step in range(100)]]
)
def test_everything_else_is_seen(values):
    assert worth_seeing(values) == (min(values), max(values))


def test_what_is_kept_is_always_seen():
    assert worth_seeing([*[1.0, 2.0] * 50, 1000.0], [0.5, 10.0]) == (0.5, 10.0)
