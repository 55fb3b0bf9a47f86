"""Lesson 14: typical wrong solutions of the exercises are refused, and right ones are not."""

import re

import numpy as np

from tests.lessons.judging import assert_judged, lesson


def test_what_it_writes_by_hand_is_what_the_package_computes():
    found = lesson(14)
    assert abs(found.losses.mean() - found.value) < 1e-4 and found.apart < 1e-3
    asked = {question for question, _ in found.heard}
    assert len(found.heard) == 4 * found.GROUP and len(asked) == 4


def test_the_mean_of_the_others():
    def leave_one_out(rewards):
        return rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)

    def scaled(rewards):
        above = rewards - rewards.mean(axis=1, keepdims=True)
        return above * rewards.shape[1] / (rewards.shape[1] - 1)

    def with_itself(rewards):
        return rewards - rewards.mean(axis=1, keepdims=True)

    def of_all_groups(rewards):
        return rewards - (rewards.sum() - rewards) / (rewards.size - 1)

    def over_all(rewards):
        return rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / rewards.shape[1]

    wrong = [
        (with_itself, "still in the mean"),
        (of_all_groups, "the others have a mean of"),
        (over_all, "the others have a mean of"),
        (lambda rewards: with_itself(rewards)[0], "the shape is (4,), not (2, 4)"),
    ]
    assert_judged(lesson(14).check_leave_one_out, wrong, leave_one_out, scaled)


def test_a_margin_that_is_large_enough():
    def ipo(margins, beta, target=1.0, factor=2.0):
        missing = margins - target / (2 * beta)
        return missing**2, factor * missing

    wrong = [
        (lambda m, beta: ipo(m, beta, target=2), "with beta=0.1 has a loss of"),
        (lambda m, beta: ipo(beta * m, beta), "with beta=0.1 has a loss of"),
        (lambda m, beta: ipo(m, beta, factor=1), "per unit, not by"),
        (lambda m, beta: ipo(m, beta, factor=-2), "per unit, not by"),
    ]
    assert_judged(lesson(14).check_ipo, wrong, ipo)


def test_a_reward_that_cannot_be_cheated():
    def only_number(_question, answer, wanted):
        found = re.findall("[0-9]+", answer)
        return float(len(found) == 1 and int(found[0]) == int(wanted))

    def contains(_question, answer, wanted):
        return float(wanted.lstrip("0") in answer)

    def in_digits(_question, answer, wanted):
        return float(re.findall("[0-9]+", answer) == [wanted])

    def any_of_them(_question, answer, wanted):
        return float(int(wanted) in map(int, re.findall("[0-9]+", answer)))

    wrong = [
        (contains, "'45, 46, 47' earns 1, not 0: it lists several numbers"),
        (in_digits, "zeros in front do not change a number"),
        (any_of_them, "it lists several numbers"),
        (lambda *_: None, "the function returns None"),
    ]
    assert_judged(lesson(14).check_only_number, wrong, only_number)


def test_an_estimate_of_the_distance():
    def distance(logp, logq):
        return np.exp(logq - logp) - 1 + logp - logq

    wrong = [
        (lambda p, q: p - q, "an estimate is negative"),
        (lambda p, q: (p - q) ** 2 / 2, "its mean over p is"),
        (lambda p, q: np.maximum(p - q, 0), "its mean over p is"),
        (lambda p, q: np.exp(p - q) - 1 - p + q, "its mean over p is"),
    ]
    assert_judged(lesson(14).check_distance, wrong, distance)
