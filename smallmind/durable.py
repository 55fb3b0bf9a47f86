"""Files that are there whole or not at all, whatever ends the process or the power.

A file is written beside its target, brought to the disk and renamed over the target; then the
directory, which holds the name, is brought to the disk too. All files that must survive go this
way (Pillai et al. 2014, "All File Systems Are Not Created Equal").
"""

import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import psutil

try:
    import fcntl
except ImportError:  # Windows
    FULL_FSYNC = None
else:
    FULL_FSYNC = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync stops at the drive's cache

AT_ONCE = 2**24  # bytes a system call: some systems refuse more than 2 GB
TEMPORARY = re.compile(r"\..+\.([0-9]{1,9})-[0-9]+\.smallmind")  # .<target>.<process>-<number>

_numbers = itertools.count()
_in_flight: set[str] = set()  # names of the temporary files that this process is writing


class Files:
    """What is done to the disk, one operation a method; tests break each of them."""

    def create(self, path: Path) -> int:
        """A new file -> its descriptor. FileExistsError where anything has its name, or a link."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        return os.open(path, flags, 0o666)

    def write(self, file: int, data: memoryview) -> int:
        """-> the number of bytes that were written, perhaps not all."""
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        if FULL_FSYNC is None:
            os.fsync(file)
        else:
            fcntl.fcntl(file, FULL_FSYNC)

    def close(self, file: int) -> None:
        os.close(file)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def fsync_directory(self, path: Path) -> None:
        if os.name == "nt":  # has no such call: names are in the file system's journal
            return
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


files = Files()


def write(path: str | PathLike[str], chunks: Iterable[bytes | memoryview]) -> None:
    """Chunks of bytes become the file at path, which is replaced whole or stays as it was.

    When this returns, the file survives a loss of power. OSError naming path where that fails; what
    was begun is removed, and another try starts from the beginning.
    """
    path = Path(path)
    name = f".{path.name}.{os.getpid()}-{next(_numbers)}.smallmind"
    with _naming(path):
        clear_stale(path.parent)
        _in_flight.add(name)
        try:
            _write_beside(path.with_name(name), path, chunks)
        finally:
            _in_flight.discard(name)
        files.fsync_directory(path.parent)


def open_regular(path: str | PathLike[str], follow: bool = True) -> BinaryIO:
    """A file to read, not through a link where follow is False.

    ValueError for anything else than a file, without waiting for anyone to write into it.
    """
    path = Path(path)
    optional = ["O_NONBLOCK", "O_NOCTTY", "O_BINARY"]
    if not follow:
        if path.is_symlink():
            raise ValueError("a symbolic link stands in its place")
        optional.append("O_NOFOLLOW")
    file = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in optional))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError("it is no regular file")
    return os.fdopen(file, "rb")


def make_directory(path: str | PathLike[str]) -> None:
    """A directory at path that survives a loss of power; one that is there stays."""
    path = Path(path)
    with _naming(path):
        with suppress(FileExistsError):
            files.make_directory(path)
        # Also for one that is there: whoever made it may have died before this.
        files.fsync_directory(path.parent)


def remove(path: str | PathLike[str]) -> None:
    """Removes a file. After a loss of power it may be there again."""
    with _naming(path):
        files.unlink(Path(path))


@contextmanager
def _naming(path: str | PathLike[str]) -> Iterator[None]:
    """Errors tell of the file that was meant, not of the one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def clear_stale(directory: Path) -> None:
    """Removes what processes that died while writing left in the directory."""
    for name in os.listdir(directory):
        match = TEMPORARY.fullmatch(name)
        if match and not _is_written(name, int(match[1])):
            with suppress(OSError):
                files.unlink(directory / name)


def _is_written(name: str, process: int) -> bool:
    # A process may have the number of a dead one: in containers it often has.
    if process == os.getpid():
        return name in _in_flight
    return psutil.pid_exists(process)


def _write_beside(temporary: Path, target: Path, chunks: Iterable[bytes | memoryview]) -> None:
    try:
        file = files.create(temporary)
        try:
            for chunk in chunks:
                _write_all(file, memoryview(chunk))
            # After an error the system may forget what it could not write: fsync is not repeated.
            files.fsync(file)
        finally:
            files.close(file)
        files.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            files.unlink(temporary)
        raise


def _write_all(file: int, rest: memoryview) -> None:
    while rest:
        rest = rest[files.write(file, rest[:AT_ONCE]) :]
