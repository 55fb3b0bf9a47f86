"""How many threads the kernels run on, and which library runs them."""

import os
import threading
from dataclasses import dataclass

import numba
import psutil

# Only one Python thread at a time runs parallel kernels: two would compete for the same cores, and
# on Numba's workqueue layer the second aborts the process.
PARALLEL_REGION = threading.Lock()


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
    os.environ.setdefault("OMP_PLACES", "cores")


@dataclass
class _Settings:
    threads: int


_settings = _Settings(numba.config.NUMBA_NUM_THREADS)  # asking Numba takes a microsecond


def set_threads(count: int) -> None:
    """Makes the kernels run on `count` threads; results do not depend on it."""
    numba.set_num_threads(count)
    _settings.threads = count


def threads() -> int:
    """The number of threads that kernels run on."""
    return _settings.threads


def max_threads() -> int:
    """The number of threads that kernels can run on."""
    return int(numba.config.NUMBA_NUM_THREADS)


def cores() -> int:
    """The number of cores to use: two threads that share one core's multipliers gain nothing."""
    return min(max_threads(), psutil.cpu_count(logical=False) or max_threads())


def has_started() -> bool:
    """Whether the library that runs the threads has started and read its environment."""
    try:
        numba.threading_layer()
    except ValueError:
        return False
    return True


def threading_layer() -> str:
    """The library that runs the threads: omp, tbb or workqueue."""
    set_threads(threads())  # starts the layer, which has no name before
    return str(numba.threading_layer())
