"""Handles Ctrl-C and the end of a session for a command."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from smallmind.console.signals import handling, impatience, raising
from smallmind.parallel.environment import launched

if TYPE_CHECKING:
    from smallmind.cli.console import Console
    from smallmind.runs.run import Run

ENDING_SIGNALS = ("SIGTERM", "SIGHUP", "SIGBREAK")  # SIGBREAK is Ctrl-Break on Windows
STOPPING = "Stopping after this step, then saving. Ctrl-C again quits without saving."


def ending_on_signals() -> AbstractContextManager[None]:
    """Ends the command on Ctrl-C, SIGTERM and SIGHUP within the block as errors do: files close.

    On Windows, which has no SIGHUP and sends no SIGTERM, Ctrl-Break does; it is also what a program
    that has started this one can send. So does SIGUSR1 with mpiexec: that of Open MPI kills its
    processes soon after any other signal.

    Only the first does, so that the next one does not disturb the end: when a terminal is closed,
    the kernel and the shell both send SIGHUP. Only another Ctrl-C interrupts the end too.
    """
    received: list[int] = []

    def end(number: int, _frame: object) -> None:
        received.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if len(received) == 1:
            raise SystemExit(128 + number)

    return raising(end, *handled("SIGINT", *ENDING_SIGNALS, *_of_mpiexec()))


@contextmanager
def stopping_on_signals(run: "Run", console: "Console") -> Iterator[list[int]]:
    """Ends training within the block after the current batch on Ctrl-C, SIGTERM and SIGHUP.

    So do Ctrl-Break on Windows, and SIGUSR1 with mpiexec.

    The list then holds the numbers of the signals. Only a second Ctrl-C, at least a second after
    the first, ends the process at once. While there is nothing to save yet, a signal does what it
    does outside of the block.
    """
    received: list[int] = []
    is_impatient = impatience()
    numbers = handled("SIGINT", *ENDING_SIGNALS, *_of_mpiexec())
    outside = {number: signal.getsignal(number) for number in numbers}

    def stop(number: int, frame: FrameType | None) -> None:
        handle = outside[number]
        if not run.training.progress.step and callable(handle):
            handle(number, frame)
            return
        if number == signal.SIGINT and is_impatient():
            os._exit(128 + number)
        if number == signal.SIGINT and number not in received:
            console.from_signal_handler(STOPPING)
        received.append(number)
        run.stop()

    with handling(stop, *numbers):
        yield received


def _of_mpiexec() -> tuple[str, ...]:
    """Returns the signals that stop only what mpiexec has started."""
    return ("SIGUSR1",) if launched() else ()


def handled(*names: str) -> list[int]:
    """-> the numbers of the signals that this system has and that are not ignored, as by nohup."""
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
