"""A run with a target loss looks at its held-out loss when it comes near, and ends there."""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from smallmind import TrainingConfig
from smallmind.training import target as targets
from smallmind.training.records import LookRecord, RunProgress, TargetRecord
from smallmind.training.spikes import DECAY
from smallmind.training.target import Estimate, Target
from tests.training.test_resume import (
    Saves,
    assert_resumes_whole,
    digest,
    new_training,
    shown,
)

B, T, TOKENS = 12, 64, 110_000  # of windows, and of the held-out text


class Curves:
    """A run whose held-out loss is known: the losses of its steps and looks scatter around it."""

    def __init__(self, seed, gap):
        self.random, self.gap = np.random.default_rng(seed), gap
        self.progress, self.smoothed = RunProgress(), None
        self.data = SimpleNamespace(batch_size=B, block_size=T, held_out=range(TOKENS + 1))

    def held_out(self, step):
        return 1.2 + 2.2 * math.exp(-step / 90) + 1.0 * math.exp(-step / 700)

    def scattered(self, loss, tokens):
        return loss + self.random.normal() * math.sqrt(2 * loss / tokens)

    def take(self, step):
        self.progress.step = step
        loss = self.scattered(self.held_out(step) - self.gap, B * T)
        old = loss if self.smoothed is None else self.smoothed
        self.smoothed = DECAY * old + (1 - DECAY) * loss

    def train(self, target, steps=1500):
        """Trains to the target -> the looks."""
        config = TrainingConfig(steps=steps, target_loss=target)
        looks = []
        for step in range(1, steps + 1):
            self.take(step)
            now = Target(config, self.data, self.progress, self.smoothed)
            if now.is_due():
                loss = self.held_out(step)
                looks.append(now.look(lambda n, loss=loss: self.scattered(loss, n * B * T / 2)))
            if self.progress.ended:
                break
        return looks


@pytest.mark.parametrize("target", [2.1, 1.9, 1.7])
def test_a_run_ends_near_its_target_and_looks_cost_a_tenth_of_it(target):
    errors = []
    for seed in range(30):
        curves = Curves(seed, gap=(-0.05, 0.0, 0.15)[seed % 3])
        *looks, last = curves.train(target)
        progress = curves.progress
        assert isinstance(last, TargetRecord) and last.target == target >= last.look_loss
        assert all(isinstance(look, LookRecord) and look.look_loss > target for look in looks)
        assert progress.looks == len(looks) + 1 and progress.first_look == (looks or [last])[0].step
        final = TOKENS / (B * T / 2)
        others = targets.PER_PASS * progress.step + final
        assert progress.look_batches <= 0.1 * (others + progress.look_batches) + 1
        errors.append(curves.held_out(progress.step) - target)
    assert np.mean(np.abs(errors)) < 0.016 and np.abs(np.mean(errors)) < 0.01
    assert np.mean(np.abs(errors) <= 0.02) >= 0.7


def test_a_run_far_from_its_target_does_not_look():
    curves = Curves(0, gap=0.0)
    assert curves.train(0.5, steps=400) == [] and not curves.progress.ended


def test_looks_come_more_often_as_the_target_comes_near():
    steps = [look.step for look in Curves(3, gap=0.1).train(1.7)]
    spaces = np.diff(steps) / steps[:-1]
    assert len(steps) > 5 and np.mean(spaces[-3:]) < np.mean(spaces[:3]) / 2


def test_what_is_more_certain_counts_more():
    assert Estimate(2.0, 0.01).combined(Estimate(3.0, 0.03)) == pytest.approx((2.25, 0.0075))
    assert Estimate(2.0, 0.01).combined(Estimate(3.0, 0.0)) == (3.0, 0.0)  # the whole text
    assert Estimate(2.0, 0.0).combined(Estimate(3.0, 0.0)) == (3.0, 0.0)


CONFIG = TrainingConfig(
    steps=250, val_every=90, val_batches=1, save_every=5, log_every=1, target_loss=1.2
)


def trained(state=None):
    training = new_training(dropout=0.0)
    return list(training.steps(CONFIG, state)), training


def test_a_resumed_run_looks_where_the_whole_one_does(tmp_path):
    records, whole = trained()
    looks = [record.step for record in records if isinstance(record, LookRecord)]
    assert len(looks) > 2 and isinstance(records[-1], TargetRecord)
    assert CONFIG.steps > records[-1].step == whole.progress.step
    saves = [step for step in range(5, records[-1].step, 5) if step > looks[0]]
    build = functools.partial(new_training, dropout=0.0)
    assert_resumes_whole(build, CONFIG, (saves[0], saves[-1]), tmp_path)


def test_a_run_stopped_within_a_look_takes_it_when_it_resumes():
    records, whole = trained()
    training, stops = new_training(dropout=0.0), []
    look = training.evaluations.look

    def stopped(*arguments):
        if not stops:
            stops.append(training.progress.step)
            training.stop()
        return look(*arguments)

    training.evaluations.look = stopped
    first = list(training.steps(CONFIG, saver=Saves(training)))
    assert training.progress.step == stops[0] and not training.progress.looks
    rest, resumed = trained(training.state())
    assert shown(first + rest) == shown(records) and digest(resumed) == digest(whole)
