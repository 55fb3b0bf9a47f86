import gc
import io
import tracemalloc

import numpy as np

from smallmind.memory.tensor_pool import TensorPool
from smallmind.memory.tracker import MemoryTracker, numpy_bytes, peak_resident_bytes
from tests.programs import output_of

MIB = 1024 * 1024


# In a process of its own: memory that others have freed may be taken again.
RENTING = """
from smallmind.memory.tensor_pool import TensorPool
from smallmind.memory.tracker import MemoryTracker

pool = TensorPool()
tracker = MemoryTracker(pool)
before = tracker.snapshot("before")
array = pool.rent(16 * 1024 * 1024)
array[:] = 1
during = tracker.snapshot("during")
pool.return_(array, clear=False)
after = tracker.snapshot("after")
assert before.pool_held == before.pool_rented == 0
assert during.resident - before.resident > 60 * 1024 * 1024
assert during.pool_rented == during.pool_held > 64 * 1024 * 1024
assert after.pool_rented == 0 and after.pool_held == after.pool_peak == during.pool_held
assert [snapshot.phase for snapshot in tracker.snapshots] == ["before", "during", "after"]
assert all(s.peak >= s.resident * 0.99 for s in tracker.snapshots)
"""


def test_a_snapshot_measures_the_process_and_the_pool():
    assert output_of(RENTING) == ""


def test_the_peak_stays_when_memory_is_freed():
    big = np.ones(16 * MIB, np.float32)
    peak = peak_resident_bytes()
    del big
    # The system counts pages per thread and adds them up only now and then.
    assert peak_resident_bytes() > peak - MIB > 64 * MIB


def test_garbage_collections_are_counted_and_timed_by_generation():
    before = len(gc.callbacks)
    tracker = MemoryTracker(TensorPool())
    first = tracker.snapshot("before")
    gc.collect(0)
    gc.collect(2)
    gc.collect(2)
    last = tracker.snapshot("after")
    assert first.collections == (0, 0, 0) and first.collecting == 0
    assert last.collections[0] >= 1 and last.collections[2] >= 2
    assert last.collecting > 0 and last.objects > 0
    row = next(line for line in tracker.report().splitlines()[8:] if "after" in line)
    assert " + ".join(map(str, last.collections)) in row
    del tracker
    gc.collect()
    assert len(gc.callbacks) == before


def test_the_share_of_numpy_is_known_while_memory_is_traced():
    assert numpy_bytes() is None
    tracemalloc.start()
    try:
        before = numpy_bytes()
        array = np.ones(MIB, np.float32)
        assert array.nbytes <= numpy_bytes() - before < array.nbytes + MIB
    finally:
        tracemalloc.stop()


def test_the_report_uses_only_characters_that_the_stream_can_encode():
    tracker = MemoryTracker(TensorPool())
    tracker.snapshot("Forward")
    for encoding, corner in (("utf-8", "╔"), ("ascii", "+")):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding)
        tracker.print_report(stream)
        stream.flush()
        text = raw.getvalue().decode(encoding)
        assert text.startswith(corner) and "Forward" in text
        assert len({len(line) for line in text.splitlines()}) == 1
