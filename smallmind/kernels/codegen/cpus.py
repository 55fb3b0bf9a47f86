"""The cores that kernels use, counted without importing Numba."""

import ctypes
import os
import sys
from pathlib import Path

import psutil

CPUS = Path("/sys/devices/system/cpu")
FULL_SPEED = 1024  # of a CPU that Linux does not grade, relative to the fastest of the machine
SLOWER_SHARE = 0.75  # times the speed of a core, below which another one is of a slower kind
# Times as much that all must compute together, for slower cores to take part.
MIN_GAIN_OF_SLOWER = 1.25
# The CPUs of this process, before its threads are bound to some of them.
USABLE = (
    os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
)


def most_threads() -> int:
    """Returns the number of threads that kernels can run on, which Numba counts likewise."""
    return int(os.environ.get("NUMBA_NUM_THREADS") or len(USABLE))


def bind_to_cores() -> None:
    """Binds each thread to its own core, for a program that starts a thread for every core.

    Otherwise the system may put two on one core while another program has the other, and they wait
    for each other in every kernel. Call it before the first kernel runs.
    """
    os.environ.setdefault("OMP_PROC_BIND", "spread")
    fast = fast_cpus()
    os.environ.setdefault("OMP_PLACES", ",".join(f"{{{cpu}}}" for cpu in fast) or "cores")


def cores() -> int:
    """Returns the number of cores to use.

    Two threads that share one core's multipliers gain nothing, and fast cores would wait for much
    slower ones: every thread has an equal share of the work.
    """
    fast = fast_cores_of_mac() or len(fast_cpus())
    return min(most_threads(), fast or psutil.cpu_count(logical=False) or most_threads())


def fast_cpus() -> list[int]:
    """-> one CPU of each core that is to be used, on Linux, if there are slower ones; else empty.

    As many of the fastest cores as compute most together, all at the speed of the slowest.
    """
    speeds = {cpu: _speed(cpu) for cpu in cpus_of_cores()}
    fastest_first = sorted(speeds, key=lambda cpu: -speeds[cpu])
    count, most = 0, 0.0
    for together, cpu in enumerate(fastest_first, 1):
        following = fastest_first[together : together + 1]
        is_last_of_kind = not following or speeds[following[0]] < SLOWER_SHARE * speeds[cpu]
        if is_last_of_kind and together * speeds[cpu] > MIN_GAIN_OF_SLOWER * most:
            count, most = together, together * speeds[cpu]
    return [] if count == len(speeds) else sorted(fastest_first[:count])


def cpus_of_cores() -> list[int]:
    """-> one CPU of each core that this process may use; all of them where that is not known."""
    found: list[int] = []
    for cpu in sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else USABLE):
        siblings = _cpus_in(CPUS / f"cpu{cpu}/topology/thread_siblings_list")
        if not set(found).intersection(siblings):  # the first of its core
            found.append(cpu)
    return found


def _speed(cpu: int) -> float:
    """Returns the speed of a CPU, relative to others of this machine.

    Linux grades CPUs on ARM, and newer versions those of Intel, which have two kinds of core. Up to
    the 14th generation the efficient ones multiply half as many numbers per cycle as the others,
    which the grade does not say.
    """
    try:
        speed = float((CPUS / f"cpu{cpu}/cpu_capacity").read_text(encoding="ascii"))
    except (OSError, ValueError):
        speed = FULL_SPEED
    is_efficient = cpu in _cpus_in(CPUS.parent.parent / "cpu_atom/cpus")
    return speed / 2 if is_efficient and not _has_wide_efficient_cores() else speed


def _has_wide_efficient_cores() -> bool:
    """-> True if Intel's efficient cores have as many multipliers as the others: since Lunar
    Lake.
    """
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("avxvnniint8"))


def _cpus_in(file: Path) -> list[int]:
    """Returns the CPUs of a list such as 0-3,8; empty if there is none."""
    try:
        ranges = [part.split("-") for part in file.read_text(encoding="ascii").split(",")]
        return [cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)]
    except (OSError, ValueError):
        return []


def fast_cores_of_mac() -> int | None:
    """-> the number of performance cores, which macOS tells of its own CPUs; elsewhere None."""
    if sys.platform != "darwin":
        return None
    count = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(count))
    name = b"hw.perflevel0.physicalcpu"
    try:
        ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(count), ctypes.byref(size), None, 0)
    except (OSError, AttributeError):
        return None
    return count.value or None
