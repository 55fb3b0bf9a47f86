"""Random numbers for the tests of kernels."""

import numpy as np
import pytest


@pytest.fixture
def random(request):
    """The generator of a test: each begins with the seed of its file."""
    return np.random.default_rng(request.module.SEED)
