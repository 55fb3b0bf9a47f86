"""How many threads a run uses, and what to do when its kernels have to be compiled.

Numba is only imported where a function needs it: the command line's help does without.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from smallmind.config import InputError, RunConfig


def choose_threads(run: RunConfig) -> int:
    """The number of threads that run asks for, or one per core; binds those to their cores.

    InputError where this machine runs fewer.
    """
    if run.backend != "numba":
        return 1
    if run.threads is None:
        # One thread per core, each bound to its own. Left to the system, two may share a core while
        # another program has the other one, and then wait for each other in every kernel. OpenMP
        # reads this when the first parallel kernel is loaded.
        os.environ.setdefault("OMP_PROC_BIND", "spread")
        os.environ.setdefault("OMP_PLACES", "cores")
    from smallmind.kernels import compilation

    available = compilation.most_threads()
    if run.threads is not None and run.threads > available:
        raise InputError(
            f"threads={run.threads} must be at most {available}, the number this machine runs"
        )
    return run.threads or compilation.cores()


def use_threads(run: RunConfig) -> None:
    """Kernels run on the threads that `choose_threads` returns from now on."""
    threads = choose_threads(run)
    if run.backend == "numba":
        from smallmind.kernels import compilation

        compilation.set_threads(threads)


@contextmanager
def announcing_compilation(announce: Callable[[], None]) -> Iterator[None]:
    """Within the block, announce is called once if a kernel is not in the cache and is compiled."""
    from smallmind.kernels import compilation

    with compilation.on_first_compile(announce):
        yield
