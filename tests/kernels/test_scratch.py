"""The memory that kernels keep between calls."""

import numpy as np

from smallmind.kernels.codegen.scratch import scratch, scratch_bytes
from tests.threads import in_threads


def test_rows_do_not_share_cache_lines():
    rows = scratch(3, 17)
    assert rows.shape[0] == 3 and rows.shape[1] >= 17
    assert all(row.ctypes.data % 64 == 0 for row in rows)
    assert rows.dtype == np.float32 and rows.flags.c_contiguous


def test_the_same_memory_is_reused():
    first = scratch(2, 100)
    assert scratch(2, 100) is first
    assert np.shares_memory(scratch(1, 5), first)


def test_scratch_grows_and_frees_what_it_has_outgrown():
    def grow():
        sizes = [(scratch(1, size).nbytes, scratch_bytes()) for size in (100, 1000, 10)]
        assert [kept for _, kept in sizes] == [448, 4032, 4032]
        for size in range(1, 2000):  # more shapes than the number of views kept
            assert scratch(1, size).shape[1] >= size

    in_threads(grow)


def test_every_python_thread_has_its_own_scratch():
    mine, theirs = scratch(1, 64), []
    in_threads(lambda: theirs.append(scratch(1, 64)))
    assert not np.shares_memory(mine, theirs[0])
