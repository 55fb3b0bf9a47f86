"""Measures the memory of the process, phase by phase."""

import gc
import sys
import time
import tracemalloc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import psutil

from smallmind.console.live_line import can_print
from smallmind.console.table import BOX, Table
from smallmind.memory.tensor_pool import TensorPool

MIB = 1024 * 1024


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory at one moment. Units: bytes."""

    phase: str
    resident: int  # of the whole process, in RAM
    peak: int  # highest resident size since the process started
    pool_held: int  # by the pool, rented and idle
    pool_rented: int
    pool_peak: int  # highest pool_rented so far
    collections: tuple[int, ...] = ()  # of garbage so far, by generation, youngest first
    collecting: float = 0.0  # seconds that these took
    objects: int = 0  # blocks of memory that Python's objects have now
    numpy: int | None = None  # in arrays that tracemalloc has seen; None if it is not tracing


class MemoryTracker:
    """`tracker.snapshot("Forward")` at the end of each phase; `print_report()` prints a table.

    Counts garbage collections from its creation on. NumPy's share of the memory is known only while
    tracemalloc traces (`tracemalloc.start()`, or `python -X tracemalloc`), which makes a program
    slower.
    """

    def __init__(self, pool: TensorPool | None = None) -> None:
        self.pool = TensorPool.shared if pool is None else pool
        self.snapshots: list[MemorySnapshot] = []
        self._collector = _Collections()
        weakref.finalize(self, gc.callbacks.remove, self._collector)
        gc.callbacks.append(self._collector)

    def snapshot(self, phase: str) -> MemorySnapshot:
        pool = self.pool.statistics()
        snapshot = MemorySnapshot(
            phase=phase,
            resident=resident_bytes(),
            peak=peak_resident_bytes(),
            pool_held=pool.bytes_held,
            pool_rented=pool.bytes_rented,
            pool_peak=pool.high_water_mark,
            collections=tuple(self._collector.counts),
            collecting=self._collector.seconds,
            objects=sys.getallocatedblocks(),
            numpy=numpy_bytes(),
        )
        self.snapshots.append(snapshot)
        return snapshot

    def report(self, ascii_only: bool = False) -> str:
        """Returns the snapshots as a table, one per line, in MiB."""

        def mib(nbytes: int) -> str:
            return f"{nbytes / MIB:.1f}"

        sizes = [(s.resident, s.peak, s.pool_held, s.pool_rented) for s in self.snapshots]
        last = [(s.resident, s.peak, s.pool_held, s.pool_peak) for s in self.snapshots]
        peaks = [max(column) for column in zip(*last, strict=True)] or [0] * 4
        memory = Table(
            "MEMORY REPORT",
            [[s.phase, *map(mib, row)] for s, row in zip(self.snapshots, sizes, strict=True)],
            ["Phase", "Resident (MiB)", "Peak (MiB)", "Pool (MiB)", "Rented (MiB)"],
            footer=["PEAK", *map(mib, peaks)],
        )
        heap = Table(
            "GARBAGE COLLECTIONS",
            [
                [
                    s.phase,
                    " + ".join(map(str, s.collections)),
                    f"{1000 * s.collecting:.1f}",
                    f"{s.objects:,}",
                    "not traced" if s.numpy is None else mib(s.numpy),
                ]
                for s in self.snapshots
            ],
            ["Phase", "Generations", "Time (ms)", "Heap blocks", "NumPy (MiB)"],
        )
        return memory.box([18], ascii_only) + heap.box([18, 15], ascii_only)

    def print_report(self, stream: TextIO | None = None) -> None:
        """Writes the report to a stream, in ASCII if its encoding lacks the box characters."""
        stream = sys.stdout if stream is None else stream
        stream.write(self.report(ascii_only=not can_print(stream, BOX)))


class _Collections:
    """Counts and times garbage collections, as one of `gc.callbacks`."""

    def __init__(self) -> None:
        self.counts = [0] * len(gc.get_count())
        self.seconds = 0.0
        self._begun = 0.0

    def __call__(self, phase: str, information: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        elif self._begun:
            self.seconds += time.perf_counter() - self._begun
            self.counts[information["generation"]] += 1


def numpy_bytes() -> int | None:
    """Returns the memory of NumPy's arrays that tracemalloc has seen; None if it is not tracing."""
    if not tracemalloc.is_tracing():
        return None
    only_numpy = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    traces = tracemalloc.take_snapshot().filter_traces([only_numpy]).traces
    return sum(trace.size for trace in traces)


def resident_bytes() -> int:
    """Returns the resident memory of this process, now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Returns the peak resident memory of this process."""
    on_windows = getattr(psutil.Process().memory_info(), "peak_wset", None)
    if on_windows is not None:
        return int(on_windows)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its peak includes the parent process before exec.
        for line in status.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
