"""SIGKILL of random ranks at random moments: the run resumes to the bits of an undisturbed one."""

import os
import re
import sys

import pytest

from tests.parallel.launching import needs_mpi
from tests.programs import printed_by

pytestmark = [needs_mpi, pytest.mark.skipif(os.name == "nt", reason="no SIGKILL on Windows")]


@pytest.mark.slow
def test_runs_whose_ranks_are_killed_end_as_if_undisturbed(tmp_path):
    printed = printed_by([sys.executable, "-m", "tests.parallel.killing", str(tmp_path), "100"])
    found = re.search(r"(\d+) ranks were killed$", printed)
    assert found and int(found[1]) >= 100
