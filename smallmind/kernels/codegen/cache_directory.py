"""Where compiled kernels are kept on disk: only where nobody else can write.

Whoever can write there can make this process run any code: what is kept is unpickled and executed.
A directory that is not safe, or cannot be written to, is replaced by the next candidate.
"""

import errno
import functools
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import llvmlite
import numba
import numpy

from smallmind.kernels.codegen import sources
from smallmind.kernels.codegen.isa import ISA

SUFFIX = ".nbc"  # of a file with compiled code
DIGEST_NAME = re.compile("[0-9a-f]{16}")  # of a directory for one state of a module
NAMES = "smallmind", "kernels"  # of directories within the one that the user chooses
DAY_SECONDS = 86400  # seconds
MAX_UNUSED_SECONDS = 7 * DAY_SECONDS  # then the kernels of other versions are removed


class UnsafeError(Exception):
    """A directory that others can write to; the message says so."""


@functools.cache
def cache_directory(module: str) -> Path | None:
    """Returns the directory of a module's compiled kernels: one for each state of its source.

    None, with a warning, if there is no place for one. It is made for each digest of the sources
    on which the module depends and of the versions that compile them: after an edit or an upgrade
    it is a different one, and stale code cannot be found.
    """
    name = _digest(module)
    for base, *names in _candidates():
        try:
            return _usable_directory(base, *names, name)
        except UnsafeError as error:
            warn(f"compiled kernels are not kept in {Path(base, *names)}: {error}")
        except OSError as error:
            if base == _chosen():  # elsewhere it is no surprise, such as a read-only home
                warn(f"SMALLMIND_CACHE_DIR: cannot keep kernels in {base}: {error.strerror}")
    try:
        return _usable_directory(_temporary_directory().name, *NAMES, name)
    except OSError as error:
        warn(f"compiled kernels are not kept: no temporary directory: {error.strerror}")
        return None


def is_ours(found: os.stat_result) -> bool:
    """-> True if a file or directory belongs to this user or root, and nobody else can write to
    it.
    """
    if not hasattr(os, "geteuid"):  # Windows: the profile's directories are private
        return True
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@functools.cache
def warn(message: str) -> None:
    """Warns once."""
    warnings.warn(message, stacklevel=2)


def _candidates() -> Iterator[list[Path | str]]:
    """Yields an existing or possible directory, and those to be made in it; the user's own choice
    first.

    The last is writable almost everywhere.
    """
    bases = [str(_chosen() or "")]
    bases += [os.environ.get(variable, "") for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA")]
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    bases.append(os.path.join(os.path.expanduser("~"), caches))
    for base in bases:
        if os.path.isabs(base):
            yield [Path(base), *NAMES]
    user = os.geteuid() if hasattr(os, "geteuid") else os.environ.get("USERNAME", "user")
    with suppress(OSError):  # there is none
        yield [Path(tempfile.gettempdir()), f"smallmind-{user}", "kernels"]


def _chosen() -> Path | None:
    """Returns the user's own choice, if there is one."""
    chosen = os.environ.get("SMALLMIND_CACHE_DIR")
    return Path(os.path.abspath(chosen)) if chosen else None


def kernels_in(directory: Path) -> Iterator[Path]:
    """Returns the files of compiled functions in a directory."""
    return directory.glob(f"*{SUFFIX}")


def _usable_directory(base: Path | str, *names: str | Path) -> Path:
    """The directory base/names[0]/... -> its path.

    UnsafeError if others could write there; OSError if this user cannot, and it is empty.
    """
    directory = _private_directory(base, *names)
    if not os.access(directory, os.W_OK) and not any(kernels_in(directory)):
        raise OSError(errno.EROFS, "it is read-only, and has no kernels of this version")
    _mark_used(directory)
    return directory


def _private_directory(base: Path | str, *names: str | Path) -> Path:
    """Makes base/names[0]/names[1]/... where it is missing -> its path.

    UnsafeError if others could put something else in its place; OSError if it cannot be made.
    """
    directory = Path(base).resolve()  # a link by which the user names it may lead anywhere
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    is_shared = found.st_mode & stat.S_ISVTX  # like /tmp: others cannot rename what is ours
    if not is_shared and not is_ours(found):
        raise UnsafeError(_advice(directory, found))
    for name in names:
        directory /= name
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UnsafeError(f"{directory} is a link or a file; remove it")
        if not is_ours(found):
            raise UnsafeError(_advice(directory, found))
    return directory


def _advice(directory: Path, found: os.stat_result) -> str:
    if found.st_uid not in (os.geteuid(), 0):
        return f"{directory} belongs to another user; name another in SMALLMIND_CACHE_DIR"
    return f"other users can write to {directory}; run: chmod go-w {directory}"


def _mark_used(directory: Path) -> None:
    """Notes once a day that the directory is in use, and removes others that have not been."""
    now = time.time()
    if directory.stat().st_mtime > now - DAY_SECONDS and any(directory.iterdir()):
        return
    with suppress(OSError):
        os.utime(directory)
        for other in directory.parent.iterdir():
            found = other.lstat()
            is_old = found.st_mtime < now - MAX_UNUSED_SECONDS
            is_cache = DIGEST_NAME.fullmatch(other.name) and stat.S_ISDIR(found.st_mode)
            if is_old and is_cache and is_ours(found):
                shutil.rmtree(other, ignore_errors=True)


def environment() -> dict[str, str]:
    """Returns the variables by which a process that this one starts finds the same directory."""
    is_temporary = _temporary_directory.cache_info().currsize
    return {"SMALLMIND_CACHE_DIR": _temporary_directory().name} if is_temporary else {}


@functools.cache
def _temporary_directory() -> "tempfile.TemporaryDirectory[str]":
    """Returns a directory that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="smallmind-kernels-", ignore_cleanup_errors=True)


def _digest(module: str) -> str:
    """Returns a digest of everything that the machine code of a module's kernels depends on.

    Not the optimisation level: it changes no result, and a cache for each level would double the
    wait of someone who uses both the command line and the library.
    """
    digest = hashlib.sha256()
    for name in sorted(sources.imported_by(module)):
        digest.update(name.encode() + b"\0" + sources.digest(name))
    versions = (sys.version, numba.__version__, llvmlite.__version__, numpy.__version__)
    config = numba.config
    target = (config.CPU_NAME, config.CPU_FEATURES, config.ENABLE_AVX, config.BOUNDSCHECK)
    digest.update(repr((*versions, *target, ISA)).encode())
    return digest.hexdigest()[:16]
