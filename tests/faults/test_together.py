"""Two processes in one directory: no write fails, and exactly one of two starts wins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are made by fork")


def counts(directory, what, number):
    """-> tried, lost."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults.together", str(directory), what, str(number)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return tuple(map(int, result.stdout.split()))


def test_processes_with_the_same_number_write_into_one_directory(tmp_path):
    assert counts(tmp_path, "writers", 400) == (400, 0)


def test_exactly_one_of_two_starts_gets_the_directory(tmp_path):
    assert counts(tmp_path, "starts", 3) == (3, 0)
