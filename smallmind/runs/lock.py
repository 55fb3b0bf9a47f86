"""One process at a time in the directory of a run."""

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
FAR = 2**30  # on Windows a locked byte cannot be read: one behind the process number is locked


class RunLock:
    """Holds a run's directory until `release`, the end of the `with` block, or of the process.

    InputError that names the other process where one holds it. The system itself releases the lock
    of a process that died; a child made by fork shares the lock of its parent.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.path = Path(directory) / NAME
        try:
            self._file: int | None = self._acquire()
        except OSError as error:
            raise InputError(f"cannot lock {self.path}: {error.strerror}") from None

    def release(self) -> None:
        """Gives the directory free. Nothing happens a second time."""
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):  # Windows removes no open file: it stays
            os.unlink(self.path)
        os.close(file)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self) -> int:
        while True:
            file = os.open(self.path, _flags(), 0o666)
            try:
                self._lock(file)
                if _is(self.path, file):
                    os.ftruncate(file, 0)
                    os.write(file, str(os.getpid()).encode())
                    return file
            except BaseException:
                os.close(file)
                raise
            # The one who held it has removed the file meanwhile: the lock is on nothing.
            os.close(file)

    def _lock(self, file: int) -> None:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise InputError(f"{self.path} is no regular file; remove it")
        try:
            _lock_now(file)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 20).decode("ascii", "replace")
            who = f"process {holder}" if holder.isdecimal() else "another process"
            raise InputError(
                f"{self.path.parent} is in use by {who}; wait for it, end it, or take another "
                "directory"
            ) from None


def _flags() -> int:
    # Neither a pipe nor a link in its place is waited for or followed.
    optional = ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY")
    return os.O_RDWR | os.O_CREAT | sum(getattr(os, name, 0) for name in optional)


def _lock_now(file: int) -> None:
    if os.name == "nt":
        os.lseek(file, FAR, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        finally:
            os.lseek(file, 0, os.SEEK_SET)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False
