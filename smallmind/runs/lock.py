"""A lock that lets one process at a time use the directory of a run."""

import os
import stat
from contextlib import suppress
from os import PathLike
from pathlib import Path

from smallmind.config import InputError

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

NAME = ".lock"
# Windows does not let others read a locked byte: lock one far past the process number.
LOCKED_BYTE = 2**30


class RunLock:
    """Locks a run's directory until `release`, or the end of the `with` block or the process.

    InputError naming the other process if one holds the lock. The system releases the lock of a
    process that dies; a forked child shares the lock of its parent.
    """

    _file: int | None = None

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.path = Path(directory) / NAME
        try:
            self._acquire()
        except OSError as error:
            raise InputError(f"cannot lock {self.path}: {error.strerror}") from None

    def release(self) -> None:
        """Releases the lock. Calling it again does nothing."""
        if self._file is None:
            return
        with suppress(OSError):  # Windows cannot remove an open file: it stays
            os.unlink(self.path)
        file, self._file = self._file, None
        os.close(file)

    def __del__(self) -> None:
        # If an interrupt came before the `with` block: the lock would last as long as the process.
        if self._file is not None:
            os.close(self._file)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self) -> None:
        while True:
            file = os.open(self.path, _flags(), 0o666)
            try:
                self._lock(file)
                if _is_same_file(self.path, file):
                    os.ftruncate(file, 0)
                    os.write(file, str(os.getpid()).encode())
                    self._file = file
                    return
            except BaseException:
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
            holder = os.read(file, 20).decode("ascii", "replace")
            who = f"process {holder}" if holder.isdecimal() else "another process"
            raise InputError(
                f"{self.path.parent} is in use by {who}; wait for it, end it, or use another "
                "directory"
            ) from None


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


def _flags() -> int:
    # Does not wait if the file is a pipe, nor follow it if it is a link.
    optional = ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY")
    return os.O_RDWR | os.O_CREAT | sum(getattr(os, name, 0) for name in optional)


def _is_same_file(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False
