import sys

import numpy as np
import pytest

from smallmind.kernels.alignment import (
    ALIGNMENT,
    MIN_MAPPED_BYTES,
    aligned_empty,
    aligned_zeros,
    give_back,
)
from smallmind.memory.tracker import resident_bytes

MIB = 2**20


@pytest.mark.parametrize(
    "nbytes", [8, 100, MIN_MAPPED_BYTES - 4, MIN_MAPPED_BYTES, MIN_MAPPED_BYTES + 4, 5 * MIB + 12]
)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int64])
def test_arrays_start_on_a_cache_line(nbytes, dtype):
    n = nbytes // np.dtype(dtype).itemsize
    for make in (aligned_empty, aligned_zeros):
        array = make((1, n), dtype)
        assert array.shape == (1, n) and array.dtype == dtype
        assert array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous
        assert not aligned_zeros((1, n), dtype).any()
        array[...] = 1
        assert (array == 1).all()


def test_a_large_array_gives_its_memory_back_wherever_it_lies():
    freed = np.empty(31 * MIB, np.uint8)  # from here on glibc keeps smaller ones in its heap
    del freed
    first, second = aligned_zeros(8 * MIB, np.uint8), aligned_zeros(8 * MIB, np.uint8)
    first[...] = second[...] = 1
    both = resident_bytes()
    del first
    assert resident_bytes() < both - 7 * MIB
    assert (second == 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="others keep the pages, or make them all")
def test_an_array_that_is_written_in_parts_takes_memory_for_these_until_they_are_given_back():
    before = resident_bytes()
    array = aligned_zeros((64, MIB), np.uint8, in_parts=True)
    array[:, 0] = 1
    assert resident_bytes() < before + 4 * MIB
    array[...] = 1
    give_back(array[1:-1])
    assert resident_bytes() < before + 4 * MIB
    assert (array[0] == 1).all() and (array[-1] == 1).all()
    array[1:-1] = 2
    give_back(array[8, 1:-1])  # whose first and last page have other elements too
    assert (array[9] == 2).all() and array[8, 0] == 2 == array[8, -1]


def test_what_the_system_refuses_is_a_memory_error():
    for make in (aligned_empty, aligned_zeros):
        with pytest.raises(MemoryError):
            make(2**60, np.float32)
