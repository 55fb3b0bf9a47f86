"""Ctrl-C during training from Python."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from smallmind.signals import handling

PATIENCE = 1.0  # seconds after which a second Ctrl-C counts: terminals may send the first one twice


class Impatience:
    """Tells a second Ctrl-C, at least a second after the first, from one that came with it."""

    def __init__(self) -> None:
        self._first: float | None = None

    def count(self) -> bool:
        """Counts a Ctrl-C -> whether it is such a second one."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first >= PATIENCE


@contextmanager
def stopping_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block, Ctrl-C calls stop; another one after a second raises KeyboardInterrupt.

    If the program has its own handler for Ctrl-C, that one stays.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    impatience = Impatience()

    def handle(_number: int, _frame: object) -> None:
        if impatience.count():
            raise KeyboardInterrupt
        stop()

    with handling(handle, signal.SIGINT):
        yield
