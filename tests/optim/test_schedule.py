import itertools

import pytest

from smallmind import TrainingConfig
from smallmind.optim.schedule import learning_rate

CONFIG = TrainingConfig(steps=1000, warmup_steps=100, learning_rate=1e-3, min_lr=1e-4)


def test_warmup_rises_in_equal_steps_from_above_zero():
    rates = [learning_rate(step, CONFIG) for step in range(101)]
    assert rates[0] > 0
    differences = [b - a for a, b in itertools.pairwise(rates)]
    assert differences == pytest.approx([differences[0]] * 100)
    assert rates[100] == pytest.approx(1e-3)


def test_cosine_falls_to_the_least_rate():
    rates = [learning_rate(step, CONFIG) for step in range(100, 1001)]
    assert rates == sorted(rates, reverse=True)
    assert rates[450] == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[-1] == learning_rate(5000, CONFIG) == 1e-4


@pytest.mark.parametrize("steps", [0, 1, 50])
def test_runs_shorter_than_the_warmup(steps):
    config = TrainingConfig(steps=steps, warmup_steps=100)
    assert all(0 < learning_rate(step, config) <= 1e-3 for step in range(steps + 1))
