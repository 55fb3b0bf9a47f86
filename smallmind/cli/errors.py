"""Errors that end a command: what is printed of them, and its exit status."""

import errno

from smallmind.checks import InputError

# Number of an error of the system -> what to do about it.
ADVICE = {
    errno.ENOSPC: "make room, or write to another disk",
    errno.EDQUOT: "make room, or write to another disk",
    errno.EFBIG: "the disk or `ulimit -f` allows no larger file; write to another disk",
    errno.EROFS: "write to another disk",
}
# Anything else is a bug, and shown with its traceback.
EXPECTED = (InputError, FloatingPointError, OSError, MemoryError, KeyboardInterrupt)


def status_of(error: BaseException) -> int:
    """-> 2 for wrong input, 130 for Ctrl-C, what SystemExit says, else 1."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, InputError):
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def message_of(error: BaseException) -> str:
    """Returns one line for the user."""
    if isinstance(error, InputError):
        # A name from a file may contain a line break.
        return " ".join(str(error).split("\n"))
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    if isinstance(error, OSError) and error.strerror:
        # Without its number, which Python writes first.
        advice = ADVICE.get(error.errno or 0)
        path = "" if error.filename is None else f"{error.filename}: "
        has_none = advice is None or ";" in error.strerror
        reason = error.strerror if has_none else f"{error.strerror}; {advice}"
        return " ".join(f"{path}{reason}".split("\n"))
    return "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
