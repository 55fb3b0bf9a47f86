"""Signal handlers for the length of a block, and signals that wait for the end of a block."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[[int, Any], Any]


@contextmanager
def handling(handle: Handler, *numbers: int) -> Iterator[None]:
    """Within the block, handle is called on these signals. Only works in the main thread."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        # Ctrl-C last: its own handler may raise as soon as it is back.
        for number in sorted(before, key=lambda number: number == signal.SIGINT):
            signal.signal(number, before[number])


@contextmanager
def deferred() -> Iterator[None]:
    """Within the block, signals wait: each is handled at its end.

    For compilers and others that call back into Python from C: an exception that a handler raises
    in such a call is printed and lost, and the work is left half done.
    """
    waiting: list[int] = []

    def remember(number: int, _frame: object) -> None:
        waiting.append(number)

    handled = [n for n in signal.valid_signals() if callable(signal.getsignal(n))]
    try:
        with handling(remember, *handled):
            yield
    finally:
        for number in waiting:
            signal.raise_signal(number)
