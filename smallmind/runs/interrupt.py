"""Signal handlers for the length of a block, such as one for Ctrl-C during training."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling(handle: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Within the block, handle is called on these signals. Only works in the main thread."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stopping_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block, the first Ctrl-C calls stop; a second one raises KeyboardInterrupt.

    If the program has its own handler for Ctrl-C, that one stays.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts = 0

    def handle(_number: int, _frame: object) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt
        stop()

    with handling(handle, signal.SIGINT):
        yield
