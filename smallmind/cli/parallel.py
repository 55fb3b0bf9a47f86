"""A command on several ranks: rank 0 runs it, the others follow."""

import argparse
import os
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from smallmind.checks import InputError
from smallmind.cli.console import error_line
from smallmind.cli.errors import EXPECTED, message_of, status_of
from smallmind.cli.signals import ENDING_SIGNALS
from smallmind.console import activity
from smallmind.console.signals import handling
from smallmind.parallel.environment import rank
from smallmind.settings.config import TrainingConfig, __version__

if sys.platform != "win32":
    import fcntl
    import termios

if TYPE_CHECKING:
    from smallmind.parallel.group import Group  # which imports NumPy

SIGNALS = ("SIGINT", *ENDING_SIGNALS, "SIGUSR1")  # rank 0 decides what they mean
PATIENCE = 1.0  # seconds that mpiexec gets to read the last words of a rank


def in_parallel(options: argparse.Namespace, lead: Callable[["Group"], int]) -> int:
    """Calls lead on rank 0, or on the only one -> exit status, which is that of all ranks."""
    from smallmind.parallel.launch import join

    threads = getattr(options, "threads", None)
    try:
        group = join(getattr(options, "rank_timeout", TrainingConfig.rank_timeout), threads)
    except InputError as error:
        _end_unjoined(error)
    if group.size == 1:
        return lead(group)
    if group.rank:
        _follow(group, options, threads)
    try:
        _check_equal(group, options)
        status = lead(group)
    except BaseException as error:
        if not group.end(status_of(error)):
            _abort(group, error)
        raise
    if not group.end(status):
        _wait_until_read()
        group.abort(status)
    return status


def _end_unjoined(error: InputError) -> NoReturn:
    """Ends all ranks because this one cannot reach them: they would wait for it."""
    from smallmind.parallel.launch import end_others

    error_line(f"smallmind: rank {rank()}: {message_of(error)}")
    _wait_until_read()
    end_others(status_of(error))
    raise SystemExit(status_of(error))


def _follow(group: "Group", options: argparse.Namespace, threads: int | None) -> NoReturn:
    """Takes part in what rank 0 does, and prints only errors that it alone has met."""
    from smallmind.parallel.group import ORDERLY
    from smallmind.runs.parallel import follow

    stops: list[Callable[[], None]] = []

    def stop(_number: int, _frame: Any) -> None:
        for stop_training in stops:
            stop_training()

    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    try:
        nowhere = activity.showing_on(lambda _phrase, _usual: None)
        with warnings.catch_warnings(), nowhere, handling(stop, *numbers):  # rank 0 shows it all
            warnings.simplefilter("ignore")
            try:
                _check_equal(group, options)
            except ORDERLY as error:
                if error is not group.agreed:
                    raise
            follow(group, threads, stops.append)
    except SystemExit:
        raise
    except BaseException as error:
        _abort(group, error)


def _abort(group: "Group", error: BaseException) -> NoReturn:
    """Ends all ranks because of an error that only this one knows."""
    if isinstance(error, EXPECTED):
        error_line(f"smallmind: {group.names[group.rank]}: {message_of(error)}")
    else:
        error_line(f"smallmind: {group.names[group.rank]}:")
        traceback.print_exception(error)
    _wait_until_read()
    group.abort(status_of(error))
    raise SystemExit(status_of(error))


def _wait_until_read() -> None:
    """Waits until mpiexec has read what was printed here: it drops the rest when all are ended."""
    end = time.monotonic() + PATIENCE
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
            while _unread(stream.fileno()) and time.monotonic() < end:
                time.sleep(0.001)


def _unread(stream: int) -> int:
    """Returns bytes that a pipe still holds, as far as the system tells; 0 of anything else."""
    if sys.platform == "win32":
        return 0
    # Not of terminals, which would count what was typed.
    if not stat.S_ISFIFO(os.fstat(stream).st_mode):
        return 0
    return int.from_bytes(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)), sys.byteorder)


def _check_equal(group: "Group", options: argparse.Namespace) -> None:
    """Raises InputError naming the first rank that was started differently from rank 0."""
    here = {name: repr(value) for name, value in vars(options).items() if name != "run"}
    here["version"] = repr(__version__)  # instead of the flag
    first = group.share(here)[0]

    def check() -> None:
        for name in sorted(first.keys() | here.keys()):
            if first.get(name) != here.get(name):
                raise InputError(
                    f"it has {name}={here.get(name)}, rank 0 {first.get(name)}: start all "
                    "ranks with the same command and version"
                )

    group.together(check)
