"""The command line: a thin caller of the library.

This file imports only what Python has already imported, so that `main` is reached at once.
"""

import _signal  # type: ignore[import-not-found]  # which `signal` wraps, after importing more
import gc
import os

MIN_OBJECTS = 20_000  # made between two looks for cycles of garbage: imports make many, and none
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Command-line arguments -> exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    SystemExit with 128 + the number of any other signal that ends the command. `estimate` returns 1
    if the run does not fit in memory, `verify` if a checkpoint is wrong.

    Without arguments it is the program itself, with those of the process. Ctrl-C then ends the
    process as long as no command has begun.
    """
    can_quit = (
        arguments is None and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    )
    if can_quit:
        _signal.signal(_signal.SIGINT, _quit)
    if arguments is None:
        gc.set_threshold(MIN_OBJECTS, *gc.get_threshold()[1:])
    from smallmind.cli.program import run

    status = run(arguments)
    if can_quit:  # while the process ends, Ctrl-C would only replace the status
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    return status


def _quit(number: int, _frame: object) -> None:
    """Ends the process at once: an exception could be lost in the imports, and come with frames."""
    try:
        os.write(2, b"\nsmallmind: interrupted\n")
    finally:
        os._exit(128 + number)
