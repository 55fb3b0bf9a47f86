"""The number of threads that kernels use, and the library that runs them."""

import os
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numba
from numba.np.ufunc import parallel

from smallmind.checks import InputError

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
