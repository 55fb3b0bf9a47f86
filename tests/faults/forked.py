"""Runs a module of faults whose children are made by fork, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def counts(module, directory, what, number=0):
    """The numbers that python -m tests.faults.MODULE DIRECTORY WHAT NUMBER prints."""
    result = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{module}", str(directory), what, str(number)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return tuple(map(int, result.stdout.split()))
