"""Plays here, for this package alone, the gaps and differences of other systems.

`python -m tests.faults.systems windows COMMAND...` runs commands as on such a system, one per
argument; a text file whose encoding is left to the system is an error.
"""

import builtins
import fcntl
import mmap
import os
import shlex
import signal
import sys
import time
import types
import warnings
from typing import ClassVar


class Other(types.ModuleType):
    """A module as another system has it: without some names, and with others changed."""

    def __init__(self, module, lacking="", **changed):
        super().__init__(module.__name__)
        vars(self).update(changed)
        self._real, self._lacking = module, lacking.split()

    def __getattr__(self, name):
        if name in self._lacking:
            raise AttributeError(f"this system has no {self.__name__}.{name}")
        return getattr(self._real, name)


class Locking:
    """Stands in for msvcrt.locking, which locks one byte, from the place in the file on."""

    LK_UNLCK, LK_NBLCK = 0, 2
    places: ClassVar[list[int]] = []

    @classmethod
    def locking(cls, file, mode, count):
        assert mode in (cls.LK_UNLCK, cls.LK_NBLCK) and count == 1
        cls.places.append(os.lseek(file, 0, os.SEEK_CUR))
        try:
            locks = fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.flock(file, locks if mode == cls.LK_NBLCK else fcntl.LOCK_UN)
        except BlockingIOError as error:
            raise PermissionError(*error.args) from None


def windows():
    """-> its modules; None are those that it lacks."""
    modules = dict.fromkeys(["fcntl", "resource", "termios", "readline", "pwd", "grp", "tty"])
    modules["os"] = Other(
        os,
        "fork register_at_fork geteuid getuid pread sched_getaffinity sched_setaffinity "
        "sched_yield mkfifo killpg setsid O_NONBLOCK O_NOFOLLOW O_NOCTTY",
        name="nt",
        O_BINARY=0,
    )
    modules["signal"] = Other(
        signal,
        "SIGHUP SIGKILL SIGALRM SIGUSR1 SIGUSR2 SIGWINCH SIGPIPE SIGCHLD setitimer ITIMER_REAL",
        SIGBREAK=signal.SIGUSR2,
    )
    modules["mmap"] = Other(mmap, "MAP_PRIVATE MAP_ANONYMOUS MADV_HUGEPAGE MADV_DONTNEED")
    modules["msvcrt"] = Locking
    # Its clock ticks 64 times a second.
    modules["time"] = Other(time, monotonic=lambda: time.monotonic() // 0.015625 * 0.015625)
    modules["sys"] = Other(sys, platform="win32")
    return modules


def macos():
    """-> its modules; None are those that it lacks."""
    return {
        "os": Other(os, "sched_getaffinity sched_setaffinity sched_yield"),
        "fcntl": Other(fcntl, F_FULLFSYNC=51),  # which this disk refuses, like a network disk there
        "mmap": Other(mmap, "MADV_HUGEPAGE"),
        "sys": Other(sys, platform="darwin"),
    }


def play(modules):
    """From now on this package imports these modules; everything else keeps the real ones."""
    real = builtins.__import__

    def import_(name, globals=None, *arguments, **named):
        if name not in modules or not str((globals or {}).get("__name__")).startswith("smallmind"):
            return real(name, globals, *arguments, **named)
        if modules[name] is None:
            raise ModuleNotFoundError(f"this system has no module {name}")
        return modules[name]

    builtins.__import__ = import_


def run(system, *commands):
    """Runs commands as on a system -> the largest exit status."""
    play({"windows": windows, "macos": macos}[system]())
    warnings.simplefilter("ignore", EncodingWarning)
    warnings.filterwarnings("error", category=EncodingWarning, module="smallmind")
    from smallmind.cli import main

    return max(main(shlex.split(command)) for command in commands)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
