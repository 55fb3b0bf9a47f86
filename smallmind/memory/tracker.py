"""Measures the memory of the process, phase by phase."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

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


class MemoryTracker:
    """`tracker.snapshot("Forward")` at the end of each phase; `print_report()` prints a table."""

    def __init__(self, pool: TensorPool | None = None) -> None:
        self.pool = TensorPool.shared if pool is None else pool
        self.snapshots: list[MemorySnapshot] = []

    def snapshot(self, phase: str) -> MemorySnapshot:
        pool = self.pool.statistics()
        snapshot = MemorySnapshot(
            phase=phase,
            resident=resident_bytes(),
            peak=peak_resident_bytes(),
            pool_held=pool.bytes_held,
            pool_rented=pool.bytes_rented,
            pool_peak=pool.high_water_mark,
        )
        self.snapshots.append(snapshot)
        return snapshot

    def report(self, ascii_only: bool = False) -> str:
        """The snapshots as a table, one per line, in MiB."""

        def mib(nbytes: int) -> str:
            return f"{nbytes / MIB:.1f}"

        sizes = [(s.resident, s.peak, s.pool_held, s.pool_rented) for s in self.snapshots]
        last = [(s.resident, s.peak, s.pool_held, s.pool_peak) for s in self.snapshots]
        peaks = [max(column) for column in zip(*last, strict=True)] or [0] * 4
        return Table(
            "MEMORY REPORT",
            [[s.phase, *map(mib, row)] for s, row in zip(self.snapshots, sizes, strict=True)],
            ["Phase", "Resident (MiB)", "Peak (MiB)", "Pool (MiB)", "Rented (MiB)"],
            footer=["PEAK", *map(mib, peaks)],
        ).box([18], ascii_only)

    def print_report(self, stream: TextIO | None = None) -> None:
        """Writes the report to a stream, in ASCII if its encoding lacks the box characters."""
        stream = sys.stdout if stream is None else stream
        stream.write(self.report(ascii_only=not can_print(stream, BOX)))


def resident_bytes() -> int:
    """The resident memory of this process, now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The peak resident memory of this process."""
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
