"""A lock that lets one process at a time use the directory of a run."""

import errno
import os
import re
import socket
import stat
from contextlib import suppress
from os import PathLike
from pathlib import Path

from smallmind.checks import InputError
from smallmind.files import durable

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

NAME = ".lock"
# Windows does not let others read a locked byte: lock one far past the process number.
LOCKED_BYTE = 2**30
CLOCK_SECONDS = 60.0  # seconds by which the clock of a disk may differ from that of the system
HOLDER = re.compile(r"([0-9]{1,20})(?: ([\w.-]{1,64}))?", re.ASCII)  # <process> <host>


class RunLock:
    """Locks a run's directory until `release`, or the end of the `with` block or the process.

    InputError naming the other process, and its host if that is another one, if one holds the lock.
    The system releases the lock of a process that dies; a forked child shares the lock of its
    parent. Containers exclude each other, and hosts too if their network disk has locks.
    """

    _file: int | None = None

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.path = Path(directory) / NAME
        self._process = os.getpid()
        try:
            self._acquire()
        except OSError as error:
            raise InputError(
                f"cannot lock {self.path}: {error.strerror}; use a directory that you can write "
                "to, on a disk that has locks"
            ) from None

    def release(self) -> None:
        """Releases the lock. Calling it again does nothing."""
        if self._file is None:
            return
        if os.name != "nt":
            self._remove()
        file, self._file = self._file, None
        os.close(file)
        if os.name == "nt":  # there an open file cannot be removed
            self._remove()

    def __del__(self) -> None:
        # If an interrupt came before the `with` block: the lock would last as long as the process.
        self.release()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _remove(self) -> None:
        with suppress(OSError):
            # A forked child leaves the lock to its parent. If someone has removed the file, there
            # may be another one by now, of the next run.
            is_in_place = self._file is None or _is_same_file(self.path, self._file)
            if os.getpid() == self._process and is_in_place:
                os.unlink(self.path)

    def _acquire(self) -> None:
        while True:
            # Does not wait if the file is a pipe, nor follow it if it is a link.
            way = os.O_RDWR | os.O_CREAT | durable.flags("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY")
            file = os.open(self.path, way, 0o666)
            try:
                self._lock(file)
                if _is_same_file(self.path, file):
                    with suppress(OSError):  # a full disk: the lock holds without a name
                        os.ftruncate(file, 0)
                        os.write(file, f"{os.getpid()} {socket.gethostname()}".encode())
                    self._file = file
                    return
            except BaseException:
                self._file = None
                os.close(file)
                raise
            # The previous holder has removed the file since: nobody else would see this lock.
            os.close(file)

    def _lock(self, file: int) -> None:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise InputError(f"{self.path} is not a regular file; remove it")
        try:
            lock_file(file)
        except (BlockingIOError, PermissionError):
            raise InputError(
                f"{self.path.parent} is in use by {_describe(os.read(file, 100))}; wait for it, "
                "end it, or use another directory"
            ) from None


def is_held(directory: str | PathLike[str]) -> bool | None:
    """Tells from outside if a process holds the lock of a directory; None if that is not known."""
    path = Path(directory) / NAME
    try:
        # Not by locking it: a run that starts meanwhile would be refused.
        with durable.open_regular(path, follow=False) as file:
            match = _match(file.read(100))
            locked = os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return None
    if not match or match[2] not in (None, socket.gethostname()):
        return None
    import psutil  # takes time to import

    try:
        holder = psutil.Process(int(match[1]))
        # Another process may have its number by now.
        is_holder = holder.create_time() < locked + CLOCK_SECONDS
        return is_holder and holder.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OverflowError):
        return None


def lock_file(file: int) -> None:
    """Locks an open file. BlockingIOError or PermissionError if another process holds it."""
    if os.name == "nt":
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        finally:
            os.lseek(file, 0, os.SEEK_SET)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_byte(file: int, position: int, unlock: bool = False) -> bool:
    """Locks a byte of an open file, or unlocks it -> False if another process holds it.

    OSError if the disk has no locks. Unlike the lock of a file it is none between threads.
    """
    try:
        if os.name == "nt":
            os.lseek(file, position, os.SEEK_SET)
            mode = msvcrt.LK_UNLCK if unlock else msvcrt.LK_NBLCK  # type: ignore[attr-defined]
            msvcrt.locking(file, mode, 1)  # type: ignore[attr-defined]
        else:
            mode = fcntl.LOCK_UN if unlock else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(file, mode, 1, position)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _describe(content: bytes) -> str:
    """Describes the holder named in a lock file."""
    match = _match(content)
    if not match:
        return "another process"
    process, host = match.groups()
    is_here = host in (None, socket.gethostname())
    return f"process {process}" if is_here else f"process {process} on {host}"


def _match(content: bytes) -> re.Match[str] | None:
    return HOLDER.fullmatch(content.decode("ascii", "replace"))


def _is_same_file(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False
