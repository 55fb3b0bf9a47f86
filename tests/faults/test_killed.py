"""SIGKILL while saving: the newest checkpoint is sound, and at most one interval is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are made by fork")


def kills(directory, what, number=0):
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults.killed", str(directory), what, str(number)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_a_save_killed_at_any_operation_leaves_a_sound_checkpoint(tmp_path):
    assert kills(tmp_path, "operations") > 20


def test_saves_killed_at_random_moments_leave_a_sound_checkpoint(tmp_path):
    assert kills(tmp_path, "saves", 50) == 50


@pytest.mark.slow
def test_saves_killed_at_a_thousand_random_moments_leave_a_sound_checkpoint(tmp_path):
    assert kills(tmp_path, "saves", 1000) == 1000


def test_runs_killed_at_random_moments_end_as_if_uninterrupted(tmp_path):
    assert kills(tmp_path, "runs", 8) >= 8


@pytest.mark.slow
def test_runs_killed_at_two_hundred_random_moments_end_as_if_uninterrupted(tmp_path):
    assert kills(tmp_path, "runs", 200) >= 200
