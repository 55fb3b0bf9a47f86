"""The number of threads that kernels use, and the library that runs them."""

import ctypes
import os
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import llvmlite.binding as llvm
import numba
import psutil
from numba.np.ufunc import parallel

from smallmind.checks import InputError

CPUS = Path("/sys/devices/system/cpu")
FULL_SPEED = 1024  # of a CPU that Linux does not grade, relative to the fastest of the machine
SLOWER_SHARE = 0.75  # times the speed of a core, below which another one is of a slower kind
# Times as much that all must compute together, for slower cores to take part.
MIN_GAIN_OF_SLOWER = 1.25
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
        # Numba has one for all processes that are forked: whoever is killed while it holds it
        # would stop all others. It makes a new one.
        parallel._backend_init_process_lock = None


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
    threads: int  # among which kernels divide their work
    running: int  # that do it
    are_fixed: bool = False  # the user has chosen them
    passes_choose: bool = True  # those that are repeated, between all and one


_most = numba.config.NUMBA_NUM_THREADS
_count = _Count(_most, _most)  # asking Numba takes a microsecond


def set_threads(count: int, are_fixed: bool = True) -> None:
    """Makes the kernels run on `count` threads; results do not depend on it.

    Unless they are fixed, training takes fewer while it is faster on these.
    """
    start_threads()
    numba.set_num_threads(count)
    _count.threads = _count.running = count
    _count.are_fixed, _count.passes_choose = are_fixed, True


def run_on(count: int, of: int) -> None:
    """Makes the kernels run on `count` of `of` threads, until `set_threads`.

    One thread does the work of all, in passes that were recorded for all. Any other number of them
    divides the work anew.
    """
    numba.set_num_threads(count)
    _count.threads, _count.running = of if count == 1 else count, count


def let_passes_choose(may_choose: bool) -> None:
    """Lets recorded passes choose one thread or all, or has them run on those that are set."""
    _count.passes_choose = may_choose


def passes_choose() -> bool:
    """Returns True if recorded passes choose between several threads and one."""
    return _count.passes_choose and _count.running > 1


def are_fixed() -> bool:
    """Returns True if the user has chosen the number of threads."""
    return _count.are_fixed


class one_thread:
    """Within the block, kernels that divide their work among threads() run it all on one."""

    # A class, which takes half as long as a generator.
    def __enter__(self) -> None:
        numba.set_num_threads(1)

    def __exit__(self, *_: TracebackType | BaseException | type | None) -> None:
        numba.set_num_threads(_count.running)


def threads() -> int:
    """Returns the number of threads among which kernels divide their work."""
    return _count.threads


def max_threads() -> int:
    """Returns the number of threads that kernels can run on."""
    return int(numba.config.NUMBA_NUM_THREADS)


def cores() -> int:
    """Returns the number of cores to use.

    Two threads that share one core's multipliers gain nothing, and fast cores would wait for much
    slower ones: every thread has an equal share of the work.
    """
    fast = fast_cores_of_mac() or len(fast_cpus())
    return min(max_threads(), fast or psutil.cpu_count(logical=False) or max_threads())


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


def has_started() -> bool:
    """Returns True if the library that runs the threads has started and read its environment."""
    try:
        numba.threading_layer()
    except ValueError:
        return False
    return True


def threading_layer() -> str:
    """Returns the library that runs the threads: omp, tbb or workqueue."""
    start_threads()  # it has no name before
    numba.set_num_threads(_count.running)
    return str(numba.threading_layer())
