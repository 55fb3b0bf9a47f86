"""Atomic file writes: a file is complete or absent, even after a crash or a power failure.

A file is written beside its target, synced and renamed over the target; then the directory, which
holds the name, is synced too. Every file that must survive is written this way (Pillai et al.
2014, "All File Systems Are Not Created Equal").
"""

import errno
import functools
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from smallmind.checks import InputError

try:
    import fcntl
except ImportError:  # Windows
    FULL_FSYNC = None
else:
    FULL_FSYNC = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync stops at the drive's cache

# fcntl returns these for disks of other computers, which lack a full sync.
NO_FULL_FSYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOTTY, errno.EOPNOTSUPP}
# Seconds between attempts at what Windows refuses while another program has the file open, as virus
# scanners and indexers do for a moment with every new one.
WAIT_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
MAX_WRITE = 2**24  # bytes per system call: some systems refuse more than 2 GB
# .<target>.<random digits>.smallmind, in earlier versions .<target>.<process>-<number>.smallmind. A
# process number says nothing: it is 1 in every container, and another host has its own.
TEMPORARY = re.compile(r"\.(.+)\.(?:[0-9a-f]{16}|[0-9]{1,9}-[0-9]+)\.smallmind")
STALE_SECONDS = 24 * 60 * 60  # since the last change: a file that is being written keeps changing


class Files:
    """Disk operations, one per method, so that tests can make each of them fail."""

    def create(self, path: Path) -> int:
        """Creates a file -> its descriptor. FileExistsError if the name exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags("O_BINARY"), 0o666)

    def write(self, file: int, data: memoryview) -> int:
        """-> the number of bytes written, which may be fewer than given."""
        return os.write(file, data)

    def overwrite(self, file: int, start: memoryview) -> None:
        """Writes over the first bytes of a file, of which there are more than these."""
        os.lseek(file, 0, os.SEEK_SET)
        write_all(file, start)
        os.lseek(file, 0, os.SEEK_END)

    def fsync(self, file: int) -> None:
        _fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def replace(self, source: Path, target: Path) -> None:
        replace(source, target)

    def unlink(self, path: Path) -> None:
        _patiently(lambda: os.unlink(path))

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def fsync_directory(self, path: Path) -> None:
        if os.name == "nt":  # no such call: the file system's journal keeps the names
            return
        file = os.open(path, os.O_RDONLY)
        try:
            _fsync(file)
        finally:
            os.close(file)


files = Files()


def flags(*names: str) -> int:
    """Returns these flags for opening a file, without those that the system lacks."""
    return sum(getattr(os, name, 0) for name in names)


TO_READ = os.O_RDONLY | flags("O_NONBLOCK", "O_NOCTTY", "O_BINARY")


def replace(source: str | PathLike[str], target: str | PathLike[str]) -> None:
    """Renames source to target, which is replaced if it exists."""
    _patiently(lambda: os.replace(source, target))


def _fsync(file: int) -> None:
    if FULL_FSYNC is not None:
        try:
            fcntl.fcntl(file, FULL_FSYNC)
            return
        except OSError as error:
            if error.errno not in NO_FULL_FSYNC:
                raise
    os.fsync(file)


def _patiently(operation: Callable[[], None]) -> None:
    """Calls operation, on Windows again as long as another program may have the file open."""
    for wait in WAIT_SECONDS if os.name == "nt" else ():
        try:
            return operation()
        except PermissionError:
            time.sleep(wait)
    operation()


def write(
    path: str | PathLike[str],
    chunks: Iterable[bytes | memoryview],
    start: Callable[[], bytes] | None = None,
) -> None:
    """Writes chunks to the file at path, which is replaced completely or left as it was.

    `start` returns, after the last chunk, what is written over the first bytes. Once this returns,
    the file survives a power failure. Raises OSError naming path on failure; the partial file is
    then removed, and a retry starts from the beginning.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.smallmind")
    with naming(path):
        clear_stale(path.parent)
        _write_beside(temporary, path, chunks, start)
        files.fsync_directory(path.parent)


def copy(source: str | PathLike[str], target: str | PathLike[str]) -> None:
    """Copies a regular file, as `write` writes. Raises OSError on failure."""
    with open_regular(source) as file:
        write(target, iter(functools.partial(file.read, MAX_WRITE), b""))


def open_regular(path: str | PathLike[str], follow: bool = True) -> io.BufferedReader:
    """Opens a regular file, or ValueError; with follow=False, not through a link. Never blocks."""
    return os.fdopen(open_descriptor(path, follow), "rb")


def open_descriptor(path: str | PathLike[str], follow: bool = True) -> int:
    """Opens like `open_regular` -> the descriptor."""
    if not follow and os.path.islink(path):
        raise ValueError("a symbolic link is in its place")
    file = os.open(path, TO_READ | (0 if follow else flags("O_NOFOLLOW")))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError("not a regular file")
    return file


def read(path: str | PathLike[str], most: int, follow: bool = True) -> bytes:
    """Returns the contents of a regular file. ValueError if it has more than `most` bytes."""
    with open_regular(path, follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def open_to_append(path: Path) -> int:
    """Opens or makes a regular file to append to -> its descriptor. OSError for anything else."""
    # Does not wait if the file is a pipe, nor follow it if it is a link.
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file; remove it")
    way = os.O_RDWR | os.O_APPEND | os.O_CREAT | flags("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY")
    file = os.open(path, way, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file; remove it")
    return file


def ends_with_line(file: int) -> bool:
    """Returns True if a file is empty or ends with a line break."""
    if not os.fstat(file).st_size:
        return True
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) == b"\n"


def make_directory(path: str | PathLike[str]) -> None:
    """Makes a directory that survives a power failure; an existing one is kept."""
    path = Path(path)
    with naming(path):
        with suppress(FileExistsError):
            files.make_directory(path)
        # Even if it existed: the process that made it may have died before syncing.
        files.fsync_directory(path.parent)


def remove(path: str | PathLike[str]) -> None:
    """Removes a file. After a power failure it may reappear."""
    with naming(path):
        files.unlink(Path(path))


@contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
    """Errors name the target file, not the temporary one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def explained(path: str | PathLike[str], kind: str) -> Iterator[None]:
    """Turns errors about a file of this kind within the block into a one-line InputError."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except MemoryError:
        raise InputError(f"{path} does not fit in memory") from None
    except ValueError as error:
        raise InputError(f"{path} is not a valid {kind}: {error}") from None


def check_new_directory(path: Path) -> None:
    """Raises InputError if there is something at a path but an empty directory."""
    with suppress(OSError):
        if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path} is not an empty directory; choose another, or remove it")


@contextmanager
def new_directory(path: Path, names: Collection[str]) -> Iterator[None]:
    """Makes a directory for a block that writes these files; after an error there are neither."""
    check_new_directory(path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for name in names:
            with suppress(OSError):
                (path / name).unlink()
        for directory in made:
            with suppress(OSError):
                directory.rmdir()
        raise


def clear_stale(
    directory: Path, age: float = STALE_SECONDS, targets: Container[str] | None = None
) -> None:
    """Removes the temporary files that writers left behind when they died.

    By default those that have not changed for a day. Whoever holds a lock that all writers of
    `targets` need can give age 0.
    """
    for name in os.listdir(directory):
        match = TEMPORARY.fullmatch(name)
        if match and (targets is None or match[1] in targets):
            with suppress(OSError):
                if max(0, time.time() - os.lstat(directory / name).st_mtime) >= age:
                    files.unlink(directory / name)


def _write_beside(
    temporary: Path,
    target: Path,
    chunks: Iterable[bytes | memoryview],
    start: Callable[[], bytes] | None,
) -> None:
    try:
        file = files.create(temporary)
        try:
            for chunk in chunks:
                write_all(file, memoryview(chunk))
            if start:
                files.overwrite(file, memoryview(start()))
            # Never retried: after an error the kernel may have dropped the dirty pages.
            files.fsync(file)
        finally:
            files.close(file)
        files.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            files.unlink(temporary)
        raise


def write_all(file: int, rest: memoryview) -> None:
    """Writes all of it to an open file."""
    while rest:
        rest = rest[files.write(file, rest[:MAX_WRITE]) :]
