"""The number of threads that compute the steps of a run: other programs may use some of the cores.

Numba is only imported where it computes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

from smallmind.console.activity import clock_ns
from smallmind.nn.recorded_passes import MIN_PASSES
from smallmind.nn.transformer import TransformerModel
from smallmind.training.records import ThreadsRecord

COLD_STEPS = MIN_PASSES + 1  # in the last one, passes are recorded


class FastestThreads:
    """As many as steps are fastest on. Results do not depend on it."""

    def __init__(self) -> None:
        from smallmind.kernels.codegen import threads
        from smallmind.kernels.codegen.thread_choice import ThreadChoice

        threads.start_threads()
        self._threads = threads
        self._most = n = threads.threads()
        self._choice = ThreadChoice({n, max(1, n - 1), max(1, n // 2), 1})
        self._steps, self._began = 0, 0

    def begin(self) -> None:
        """Notes that a step begins."""
        self._steps += 1
        if not self._is_choosing():
            return
        self._threads.run_on(self._choice.next(), self._most)
        self._threads.let_passes_choose(False)
        self._began = clock_ns()

    def end(self) -> None:
        """Notes that the step has been computed. Without a call it does not count."""
        if not self._is_choosing():
            return
        self._choice.took(clock_ns() - self._began)
        self._threads.run_on(self._choice.best, self._most)  # also what follows, no trial
        self._threads.let_passes_choose(True)

    def _is_choosing(self) -> bool:
        return self._steps > COLD_STEPS and not self._threads.are_fixed()  # meanwhile

    def news(self, step: int) -> ThreadsRecord | None:
        """Returns a record if another number has become the fastest, and stayed it."""
        if not self._choice.has_news():
            return None
        return ThreadsRecord(step, self._choice.best, self._most)

    def close(self) -> None:
        """Lets kernels run on all threads again."""
        if not self._threads.are_fixed():
            self._threads.set_threads(self._most, are_fixed=False)


def may_choose(model: TransformerModel, processes: int) -> bool:
    """Returns True unless the user has set the number of threads, or it is one.

    Not for several processes: they would wait for the slowest all the same.
    """
    if model.backend != "numba" or processes > 1 or model.workspace.threads() == 1:
        return False
    from smallmind.kernels.codegen.threads import are_fixed

    return not are_fixed()


def choosing_threads(
    model: TransformerModel, processes: int
) -> AbstractContextManager[FastestThreads | None]:
    """Runs steps within the block on the number of threads that is fastest, if it may be chosen."""
    return closing(FastestThreads()) if may_choose(model, processes) else nullcontext()


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Runs kernels within the block on one thread, which does the work of all."""
    from smallmind.kernels.codegen import threads

    of, are_fixed = threads.threads(), threads.are_fixed()
    threads.set_threads(of)  # so that training takes no others
    threads.run_on(1, of)
    try:
        yield
    finally:
        threads.set_threads(of, are_fixed)
