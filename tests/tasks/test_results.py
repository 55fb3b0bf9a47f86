"""Intervals of shares, and of the difference of two models on the same items."""

import pytest

from smallmind.tasks.results import difference, paired, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (462, 1000, 0.4313, 0.4930),
    ],
)
def test_wilson_intervals_are_those_of_the_tables(right, count, low, high):
    found = wilson(right, count)
    assert found.value == right / count
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_equal_verdicts_are_no_difference():
    verdicts = "0110" * 50
    found = difference([verdicts], [verdicts])
    assert found.value == 0 and found.has_zero and "no difference" in found.told()


def test_a_few_changes_are_no_difference_and_many_are():
    before = [0.0] * 100
    few, many = [1.0] * 3 + [0.0] * 97, [1.0] * 30 + [0.0] * 70
    assert paired(before, few).has_zero
    assert not paired(before, many).has_zero and paired(before, many).value == 0.3


def test_a_difference_that_seeds_explain_is_none():
    def verdicts(right):
        return "1" * right + "0" * (1000 - right)

    alone = difference([verdicts(500)], [verdicts(600)])
    seeds = difference([verdicts(500), verdicts(600)], [verdicts(520), verdicts(640)])
    assert not alone.has_zero and seeds.has_zero
