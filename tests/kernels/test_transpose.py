"""The transpose moves numbers of any type as they are."""

import numpy as np
import pytest

from smallmind.kernels import compiled, reference
from smallmind.kernels.number_types import BFLOAT16, FLOAT16
from tests.guards import Guarded

SEED = 3
SIZES = [*range(1, 19), 31, 32, 33, 40, 64, 65, 130]


@pytest.mark.parametrize("dtype", [np.float32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("others", [3, 35])
def test_every_size_matches_the_reference(random, dtype, others):
    bits = np.uint32 if dtype == np.float32 else np.uint16
    for R, C in [*((size, others) for size in SIZES), *((others, size) for size in SIZES)]:
        # All bits, NaN among them: nothing is computed.
        x = random.integers(0, np.iinfo(bits).max, (R, C), bits, endpoint=True).view(dtype)
        for first, width in ((0, R), (0, R + 9), (5, R + 5), (7, R + 20)):
            found, expected = Guarded((C, width), dtype=dtype), Guarded((C, width), dtype=dtype)
            compiled.transpose(found.array, x, first)
            reference.transpose(expected.array, x, first)
            found.assert_intact()
            np.testing.assert_array_equal(found.array.view(bits), expected.array.view(bits))
