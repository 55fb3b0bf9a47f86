"""How many threads a run uses.

Numba is only imported in the functions that need it: the command line's help does not.
"""

import itertools
import math
import os

from smallmind.checks import InputError, check_field
from smallmind.settings.config import ModelConfig, RunConfig, TrainingConfig
from smallmind.settings.settings import Settings

# Operations that a thread computes in the time by which one more of them makes each parallel region
# longer: a microsecond or less, `python -m bench threads` measures it.
OPERATIONS_PER_THREAD = 50_000
MIN_THREADS = 2  # recorded passes try one themselves


def choose_threads(run: RunConfig, settings: Settings | None = None) -> int:
    """Returns the threads that are set, or one per core, which are then bound to their cores.

    Fewer if the settings make passes too small for more. InputError if too many are set.
    """
    if run.backend != "numba":
        return 1
    from smallmind.kernels.codegen import cpus

    if run.threads is not None:
        return _checked(run.threads)
    cpus.bind_to_cores()
    most = useful_threads(settings.model, settings.training, run) if settings else math.inf
    return int(min(cpus.cores(), most))


def _checked(n: int) -> int:
    """Returns a number of threads. InputError unless this machine runs as many."""
    from smallmind.kernels.codegen import threads

    available, n = threads.max_threads(), check_field(RunConfig, "threads", n)
    if n > available:
        raise InputError(f"threads={n} must be at most {available}, the number this machine runs")
    return n


def useful_threads(model: ModelConfig, training: TrainingConfig, run: RunConfig) -> int:
    """Returns the number of threads that a training pass is fastest on, if there are enough cores.

    A parallel region of W operations takes W / n + c n on n threads, where c is what each of them
    costs: least for n = sqrt(W / c).
    """
    windows = min(run.batch_size, training.micro_batch_size or run.batch_size)
    L, C, T = model.n_layer, model.n_embd, model.block_size
    parameters = 12 * L * C * C + model.vocab_size * C
    # Six operations per parameter and token, and the causal products of attention.
    operations = (6 * parameters + 6 * L * C * T) * windows * T
    regions = 23 * L + 10
    return max(MIN_THREADS, round(math.sqrt(operations / regions / OPERATIONS_PER_THREAD)))


def divided_cpus(count: int) -> list[list[int]]:
    """-> CPUs for each of `count` processes side by side: one CPU of each core, all of them fast.

    Empty lists where the system cannot bind a process to CPUs. InputError if there are fewer cores.
    """
    from smallmind.kernels.codegen.cpus import cores, cpus_of_cores, fast_cpus

    can_bind = hasattr(os, "sched_setaffinity")
    cpus = fast_cpus() or cpus_of_cores()
    most = len(cpus) if can_bind else cores()
    if count > most:
        raise InputError(f"{count} at a time need {count} cores, and this machine has {most}")
    bounds = [len(cpus) * i // count for i in range(count + 1)]
    return [cpus[low:high] if can_bind else [] for low, high in itertools.pairwise(bounds)]


def use_threads(run: RunConfig) -> None:
    """Runs kernels on the threads of a run from now on, or on all that this machine runs."""
    if run.backend != "numba":
        return
    from smallmind.kernels.codegen import threads

    count = min(run.threads or choose_threads(run), threads.max_threads())
    threads.set_threads(count, are_fixed=not run.adapt_threads)


def set_threads(n: int | None = None, pin: bool = False) -> None:
    """Runs all kernels on n threads from now on; None: one per core.

    Without n, training takes fewer while other programs use some of the cores.

    `pin` binds every thread to a core of its own, as the command line does by default. The system
    may otherwise put two on one core, and each then waits for the other. Pin only before the first
    kernel has run, and only if no other program keeps the cores busy. InputError if n is not from
    1 to the number that this machine runs, or if it is too late to pin.
    """
    from smallmind.kernels.codegen import cpus, threads

    count = _checked(n) if n is not None else cpus.cores()
    if pin:
        if threads.has_started():
            raise InputError(
                "the threads are running already: call set_threads(..., pin=True) before anything "
                "else of smallmind computes"
            )
        cpus.bind_to_cores()
    threads.set_threads(count, are_fixed=n is not None)
