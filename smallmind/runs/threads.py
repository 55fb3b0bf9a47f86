"""How many threads a run uses.

Numba is only imported in the functions that need it: the command line's help does not.
"""

from smallmind.checks import InputError
from smallmind.config import RunConfig


def choose_threads(run: RunConfig) -> int:
    """The number of threads that are set, or one per core, which are then bound to their cores.

    InputError if this machine runs fewer.
    """
    if run.backend != "numba":
        return 1
    from smallmind.kernels.codegen import threads

    if run.threads is None:
        threads.bind_to_cores()
    available = threads.max_threads()
    if run.threads is not None and run.threads > available:
        raise InputError(
            f"threads={run.threads} must be at most {available}, the number this machine runs"
        )
    return run.threads or threads.cores()


def use_threads(run: RunConfig) -> None:
    """Runs kernels on the threads of a run from now on: those that it was created with.

    All that this machine runs if those are fewer: it may be another one.
    """
    if run.backend != "numba":
        return
    from smallmind.kernels.codegen import threads

    threads.set_threads(min(run.threads or choose_threads(run), threads.max_threads()))


def set_threads(n: int | None = None, pin: bool = False) -> None:
    """Runs all kernels on n threads from now on; None: one per core.

    `pin` binds every thread to a core of its own, as the command line does by default. The system
    may otherwise put two on one core, and each then waits for the other. Pin only before the first
    kernel has run, and only if no other program keeps the cores busy. InputError if n is not from
    1 to the number that this machine runs, or if it is too late to pin.
    """
    from smallmind.kernels.codegen import threads

    count = choose_threads(RunConfig(threads=n)) if n is not None else threads.cores()
    if pin:
        if threads.has_started():
            raise InputError(
                "the threads are running already: call set_threads(..., pin=True) before anything "
                "else of smallmind computes"
            )
        threads.bind_to_cores()
    threads.set_threads(count)
