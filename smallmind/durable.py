"""Atomic file writes: a file is complete or absent, even after a crash or a power failure.

A file is written beside its target, synced and renamed over the target; then the directory, which
holds the name, is synced too. Every file that must survive is written this way (Pillai et al.
2014, "All File Systems Are Not Created Equal").
"""

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
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

MAX_WRITE = 2**24  # bytes per system call: some systems refuse more than 2 GB
TEMPORARY = re.compile(r"\..+\.([0-9]{1,9})-[0-9]+\.smallmind")  # .<target>.<process>-<number>

_numbers = itertools.count()
_in_flight: set[str] = set()  # temporary files that this process is writing


class Files:
    """Disk operations, one per method, so that tests can make each of them fail."""

    def create(self, path: Path) -> int:
        """Creates a file -> its descriptor. FileExistsError if the name exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        return os.open(path, flags, 0o666)

    def write(self, file: int, data: memoryview) -> int:
        """-> the number of bytes written, which may be fewer than given."""
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
        if os.name == "nt":  # no such call: the file system's journal keeps the names
            return
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


files = Files()


def write(path: str | PathLike[str], chunks: Iterable[bytes | memoryview]) -> None:
    """Writes chunks to the file at path, which is replaced completely or left as it was.

    Once this returns, the file survives a power failure. Raises OSError naming path on failure;
    the partial file is then removed, and a retry starts from the beginning.
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
    """Opens a regular file for reading; with follow=False, not through a symbolic link.

    ValueError for anything but a regular file. Never blocks, even on a FIFO.
    """
    path = Path(path)
    optional = ["O_NONBLOCK", "O_NOCTTY", "O_BINARY"]
    if not follow:
        if path.is_symlink():
            raise ValueError("a symbolic link is in its place")
        optional.append("O_NOFOLLOW")
    file = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in optional))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError("not a regular file")
    return os.fdopen(file, "rb")


def open_append(path: str | PathLike[str]) -> FileIO:
    """Opens a regular file, which is created if it is missing, for appending, without a buffer.

    OSError for anything else, such as a symbolic link. Never blocks, even on a FIFO.
    """
    names = ["O_NONBLOCK", "O_NOCTTY", "O_BINARY", "O_NOFOLLOW"]
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | sum(getattr(os, n, 0) for n in names)
    with _naming(path):
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "not a regular file; remove it")
        return FileIO(os.open(path, flags, 0o666), "ab")


def make_directory(path: str | PathLike[str]) -> None:
    """Makes a directory that survives a power failure; an existing one is kept."""
    path = Path(path)
    with _naming(path):
        with suppress(FileExistsError):
            files.make_directory(path)
        # Even if it existed: the process that made it may have died before syncing.
        files.fsync_directory(path.parent)


def remove(path: str | PathLike[str]) -> None:
    """Removes a file. After a power failure it may reappear."""
    with _naming(path):
        files.unlink(Path(path))


@contextmanager
def _naming(path: str | PathLike[str]) -> Iterator[None]:
    """Errors name the target file, not the temporary one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def clear_stale(directory: Path) -> None:
    """Removes temporary files left in the directory by processes that died while writing."""
    for name in os.listdir(directory):
        match = TEMPORARY.fullmatch(name)
        if match and not _is_being_written(name, int(match[1])):
            with suppress(OSError):
                files.unlink(directory / name)


def _is_being_written(name: str, process: int) -> bool:
    # Process ids are reused, especially in containers.
    if process == os.getpid():
        return name in _in_flight
    return psutil.pid_exists(process)


def _write_beside(temporary: Path, target: Path, chunks: Iterable[bytes | memoryview]) -> None:
    try:
        file = files.create(temporary)
        try:
            for chunk in chunks:
                _write_all(file, memoryview(chunk))
            # Never retried: after an error the kernel may have dropped the dirty pages.
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
        rest = rest[files.write(file, rest[:MAX_WRITE]) :]
