"""SIGKILL of random ranks at random moments: the run resumes to the bits of an undisturbed one."""

import os
import re
import subprocess
import sys

import pytest

from tests.parallel.launching import ROOT, needs_mpi

pytestmark = [needs_mpi, pytest.mark.skipif(os.name == "nt", reason="no SIGKILL on Windows")]


@pytest.mark.slow
def test_runs_whose_ranks_are_killed_end_as_if_undisturbed(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "tests.parallel.killing", str(tmp_path), "100"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = re.search(r"(\d+) ranks were killed$", result.stdout)
    assert found and int(found[1]) >= 100
