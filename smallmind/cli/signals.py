"""What Ctrl-C and the end of a session do to a command."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from smallmind.runs.interrupt import handling

if TYPE_CHECKING:
    from smallmind.runs.session import Run


def ending_on_signals() -> AbstractContextManager[None]:
    """Within the block, SIGTERM and SIGHUP end the command as exceptions do: files are closed."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    return handling(end, *_handled("SIGTERM", "SIGHUP"))


@contextmanager
def stopping_on_signals(run: "Run") -> Iterator[list[int]]:
    """Within the block, Ctrl-C, SIGTERM and SIGHUP end training after the current batch.

    The list then holds the number of the signal. A second signal ends the process at once, and so
    does the first one while there is nothing to save yet.
    """
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        if received:
            os._exit(128 + number)
        if not run.training.progress.step:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        received.append(number)
        run.stop()

    with handling(stop, *_handled("SIGINT", "SIGTERM", "SIGHUP")):
        yield received


def _handled(*names: str) -> list[int]:
    """The numbers of the signals that this system has and that are not ignored, as by nohup."""
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
