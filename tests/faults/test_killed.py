"""SIGKILL while saving: the newest checkpoint is sound, and at most one interval is lost."""

import os

import pytest

from tests.faults.forked import counts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are made by fork")


def test_a_save_killed_at_any_operation_leaves_a_sound_checkpoint(tmp_path):
    (kills,) = counts("killed", tmp_path, "operations")
    assert kills > 20


def test_the_next_start_takes_over_what_a_killed_one_has_left(tmp_path):
    (different,) = counts("killed", tmp_path, "starts")
    assert different >= 7


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_saves_killed_at_random_moments_leave_a_sound_checkpoint(tmp_path, number):
    assert counts("killed", tmp_path, "saves", number) == (number,)


@pytest.mark.parametrize("number", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_runs_killed_at_random_moments_end_as_if_uninterrupted(tmp_path, number):
    (kills,) = counts("killed", tmp_path, "runs", number)
    assert kills >= number
