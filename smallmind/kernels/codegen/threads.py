"""The number of threads that kernels use, and the library that runs them."""

import ctypes
import os
import sys
import threading
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numba
import psutil
from numba.np.ufunc import parallel

from smallmind.checks import InputError

CPUS = Path("/sys/devices/system/cpu")
# The CPUs of this process, before its threads are bound to some of them.
USABLE = (
    os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
)
# Only one Python thread at a time runs parallel kernels: two would compete for the same cores, and
# on Numba's workqueue layer the second aborts the process.
_one_at_a_time = threading.Lock()


class _Starting:
    """In place of the lock until the first parallel kernel runs: starts the threads."""

    def __enter__(self) -> None:
        start_threads()
        PARALLEL.region = _one_at_a_time
        _one_at_a_time.acquire()

    def __exit__(self, *_: TracebackType | BaseException | type | None) -> None:
        _one_at_a_time.release()


class _Forked:
    """In place of the lock in a forked process, which has no copy of its parent's threads.

    Only GNU OpenMP would wait for them or end the process; the other layers start new ones.
    """

    def __enter__(self) -> None:
        raise RuntimeError(
            "kernels cannot run in a process that was forked after they had run: start processes "
            "with the method spawn (multiprocessing.get_context('spawn')), or import smallmind "
            "only after forking"
        )

    def __exit__(self, *_: TracebackType | BaseException | type | None) -> None:
        pass


@dataclass
class _Parallel:
    """`with PARALLEL.region:` surrounds every parallel kernel."""

    region: AbstractContextManager[Any]


PARALLEL = _Parallel(_Starting())


def _after_fork() -> None:
    if parallel._is_initialized:  # perhaps by kernels of the caller's own
        is_openmp = numba.threading_layer() == "omp"
        PARALLEL.region = _Forked() if is_openmp else threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def start_threads() -> None:
    """Loads the threading layer. InputError if NUMBA_THREADING_LAYER names one that is missing."""
    try:
        numba.get_num_threads()
    except (ImportError, RuntimeError, ValueError):
        layer = numba.config.THREADING_LAYER
        install = "install it (python -m pip install tbb) or " if layer == "tbb" else ""
        raise InputError(
            f"the threading layer {layer!r} cannot be loaded: {install}unset "
            "NUMBA_THREADING_LAYER and NUMBA_THREADING_LAYER_PRIORITY"
        ) from None


def limit_spinning() -> None:
    """Makes threads that wait at the end of a parallel region sleep soon.

    By default GNU OpenMP lets them spin for 4 ms. If the system has put two threads on one core,
    each region then costs two time slices: a step of 14 ms takes 800. With this setting they sleep
    after 5000 rounds (65 us), which costs nothing if each thread has its own core. OpenMP reads its
    environment when the first parallel kernel is loaded.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def bind_to_cores() -> None:
    """Binds each thread to its own core, for a program that starts a thread for every core.

    Otherwise the system may put two on one core while another program has the other, and they wait
    for each other in every kernel. Call it before the first kernel runs.
    """
    os.environ.setdefault("OMP_PROC_BIND", "spread")
    fast = fast_cpus()
    os.environ.setdefault("OMP_PLACES", ",".join(f"{{{cpu}}}" for cpu in fast) or "cores")


@dataclass
class _Count:
    threads: int


_count = _Count(numba.config.NUMBA_NUM_THREADS)  # asking Numba takes a microsecond


def set_threads(count: int) -> None:
    """Makes the kernels run on `count` threads; results do not depend on it."""
    start_threads()
    numba.set_num_threads(count)
    _count.threads = count


class one_thread:
    """Within the block, kernels that divide their work among threads() run it all on one."""

    # A class, which takes half as long as a generator.
    def __enter__(self) -> None:
        numba.set_num_threads(1)

    def __exit__(self, *_: TracebackType | BaseException | type | None) -> None:
        numba.set_num_threads(_count.threads)


def threads() -> int:
    """The number of threads that kernels run on."""
    return _count.threads


def max_threads() -> int:
    """The number of threads that kernels can run on."""
    return int(numba.config.NUMBA_NUM_THREADS)


def cores() -> int:
    """The number of cores to use.

    Two threads that share one core's multipliers gain nothing. Where some cores are much slower
    than others, all would wait for these: every thread has an equal share of the work.
    """
    fast = fast_cores_of_mac() or len(fast_cpus())
    return min(max_threads(), fast or psutil.cpu_count(logical=False) or max_threads())


def fast_cpus() -> list[int]:
    """The CPUs that have more than half the speed of the fastest, on Linux; empty if all have."""
    capacities = {}
    for file in CPUS.glob("cpu[0-9]*/cpu_capacity"):  # only where they differ, or on ARM
        with suppress(OSError, ValueError):
            capacities[int(file.parent.name[3:])] = int(file.read_text(encoding="ascii"))
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        capacities = {cpu: speed for cpu, speed in capacities.items() if cpu in usable}
    fast = [cpu for cpu, speed in capacities.items() if 2 * speed > max(capacities.values())]
    return [] if len(fast) == len(capacities) else sorted(fast)


def fast_cores_of_mac() -> int | None:
    """The number of performance cores, which macOS tells of its own CPUs; elsewhere None."""
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


def has_started() -> bool:
    """True if the library that runs the threads has started and read its environment."""
    try:
        numba.threading_layer()
    except ValueError:
        return False
    return True


def threading_layer() -> str:
    """The library that runs the threads: omp, tbb or workqueue."""
    set_threads(threads())  # starts the layer, which has no name before
    return str(numba.threading_layer())
