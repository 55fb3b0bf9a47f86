"""Errors that end a command: what is printed of them, and its exit status."""

from smallmind.checks import InputError

# Anything else is a bug, and shown with its traceback.
EXPECTED = (InputError, FloatingPointError, OSError, MemoryError, KeyboardInterrupt)


def status_of(error: BaseException) -> int:
    """2 for wrong input, 130 for Ctrl-C, what SystemExit says, else 1."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, InputError):
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def message_of(error: BaseException) -> str:
    """One line for the user."""
    if isinstance(error, InputError):
        # A name from a file may contain a line break.
        return " ".join(str(error).split("\n"))
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
