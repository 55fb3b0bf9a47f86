"""Signal handlers for a block, signals that wait for its end, and what ends a run in order."""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, Any], Any]

PATIENCE = 1.0  # seconds after which a second Ctrl-C counts: terminals may send the first one twice
PAUSE = 0.001  # seconds until a signal whose exception was lost is sent again
_deferred: list[int] = []  # signals that have come within `deferred` blocks, which have not ended


class Stopped(Exception):
    """Raised to end a run before its next batch."""


@contextmanager
def handling(handle: Handler, *numbers: int) -> Iterator[None]:
    """Calls handle on these signals within the block. Only works in the main thread."""
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
def raising(handle: Handler, *numbers: int) -> Iterator[None]:
    """Handles signals by a handler that raises: that ends the block wherever it is raised.

    A signal may come in a finaliser, or in a callback of a weak reference, the garbage collector
    or C. Python drops what is raised there, and importlib has such a callback for every module
    that it imports. The signal is then sent again, and its exception raised again.
    """
    raised: tuple[BaseException, int] | None = None
    is_lost = False
    report = sys.unraisablehook

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal raised, is_lost
        if _is_within(frame, recover):
            _send_later(number)
            return
        try:
            if is_lost and raised and raised[1] == number:
                is_lost = False
                raise raised[0]
            handle(number, frame)
        except BaseException as error:
            raised = error, number
            raise

    def recover(unraisable: Any) -> None:
        nonlocal is_lost
        if raised and raised[0] in _chain(unraisable.exc_value):
            is_lost = True
            _send_later(raised[1])
        else:
            report(unraisable)

    sys.unraisablehook = recover
    try:
        with handling(receive, *numbers):
            yield
    except (ImportError, RuntimeError) as error:
        # A class body and an extension module that is being imported raise their own instead.
        if raised and raised[0] in _chain(error):
            raise raised[0] from None
        raise
    finally:
        sys.unraisablehook = report


def _send_later(number: int) -> None:
    """Sends a signal to the main thread in a moment: also one that sleeps or waits for input."""

    def send() -> None:
        time.sleep(PAUSE)
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            _thread.interrupt_main(signal.Signals(number))

    _thread.start_new_thread(send, ())


def _is_within(frame: FrameType | None, function: Any) -> bool:
    """Returns True if a frame belongs to a call of this function."""
    while frame and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, the one during whose handling it was raised, and so on."""
    while error:
        yield error
        error = error.__context__


@contextmanager
def deferred() -> Iterator[None]:
    """Defers signals within the block: each is handled at its end.

    For compilers and others that call back into Python from C: an exception that a handler raises
    in such a call is printed and lost, and the work is left half done.
    """
    waiting: list[int] = []

    def remember(number: int, _frame: object) -> None:
        waiting.append(number)
        _deferred.append(number)

    handled = [n for n in signal.valid_signals() if callable(signal.getsignal(n))]
    try:
        with handling(remember, *handled):
            yield
    finally:
        del _deferred[len(_deferred) - len(waiting) :]
        for number in waiting:
            signal.raise_signal(number)


def is_any_deferred() -> bool:
    """Returns True if a signal waits for the end of a `deferred` block."""
    return bool(_deferred)


def impatience() -> Callable[[], bool]:
    """Returns a function to call at each Ctrl-C: True if it is a second one, not an echo."""
    presses: list[float] = []

    def is_impatient() -> bool:
        presses.append(time.monotonic())
        return presses[-1] - presses[0] >= PATIENCE

    return is_impatient


@contextmanager
def stopping_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Calls stop on Ctrl-C within the block, unless the program handles it; then raises."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_impatient = impatience()

    def handle(_number: int, _frame: object) -> None:
        if is_impatient():
            raise KeyboardInterrupt
        stop()

    with handling(handle, signal.SIGINT):
        yield
