"""Random numbers and several threads for the tests of kernels."""

import numpy as np
import pytest

from smallmind.kernels.codegen.threads import max_threads, set_threads, threads


@pytest.fixture(scope="module", autouse=True)
def all_threads():
    """Kernels divide their work."""
    before = threads()
    set_threads(max_threads(), are_fixed=False)
    yield
    set_threads(before, are_fixed=False)


@pytest.fixture
def random(request):
    """The generator of a test: each begins with the seed of its file."""
    return np.random.default_rng(request.module.SEED)
