"""Every tail of a vector, a tile and a chunk, between guard values, of every kernel."""

import pytest

from smallmind.kernels import cases
from smallmind.kernels.description import KERNELS, described

COLUMNS = (*range(1, 35), 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 129, 130)
ROWS = (1, 2, 3, 4, 6, 7, 13, 16, 17, 64, 65, 129)
OTHERS = (2, 3, 5, 7)  # sizes of the other axes


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_any_size_matches_its_plain_twin(name):
    axes = described(name).arguments.axes
    for place in range(len(axes)):
        for size in COLUMNS if place == len(axes) - 1 else ROWS:
            sizes = [*OTHERS[:place], size, *OTHERS[place + 1 : len(axes)]]
            kind = cases.types(name)[0]
            cases.Case(name, cases.fitted(name, sizes, 2**16), kind, optional=True).check()
