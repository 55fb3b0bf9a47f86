"""How many threads a run uses.

Numba is only imported in the functions that need it: the command line's help does not.
"""

from smallmind.config import InputError, RunConfig


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
    """Runs kernels on the threads that `choose_threads` returns, from now on."""
    count = choose_threads(run)
    if run.backend == "numba":
        from smallmind.kernels.codegen.threads import set_threads

        set_threads(count)
