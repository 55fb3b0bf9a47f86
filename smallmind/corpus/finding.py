"""Finding the files that paths, folders and globs mean, always in the same order."""

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.entry import NESTED
from smallmind.corpus.reading import Skipped, not_regular, shown
from smallmind.corpus.shards import holds_tokens

WILDCARDS = "*?["
RUN = ("config.json", "metrics.jsonl")  # files in the directory of a run


class File(NamedTuple):
    """A file with texts."""

    path: Path
    size: int  # bytes
    is_named: bool  # rather than found in a folder or by a glob

    @property
    def is_compressed(self) -> bool:
        """True if the file takes more space when unpacked."""
        return self.path.suffix.lower() in NESTED


class _Finder:
    """Collects files, each of them once."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}  # by the path without symbolic links
        self._folders: set[str] = set()  # the same of folders: links may lead back to them
        self.skipped: dict[str, Skipped] = {}

    def add(self, given: str) -> None:
        """The files that a path means. InputError if there is nothing, or no file."""
        try:
            status = os.stat(given)
            if stat.S_ISDIR(status.st_mode):
                os.listdir(given)  # OSError if it cannot be read
        except (FileNotFoundError, NotADirectoryError):
            self._add_glob(given)
            return
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {shown(given)}: {_reason(error)}") from None
        if stat.S_ISDIR(status.st_mode):
            self._add_found(Path(given))
        elif stat.S_ISREG(status.st_mode):
            self._add_file(Path(given), status.st_size, is_named=True)
        else:
            raise InputError(not_regular(given))

    def _add_glob(self, given: str) -> None:
        if not any(mark in given for mark in WILDCARDS):
            raise InputError(
                f"{shown(given) or repr(given)} does not exist; give the path of a file or folder, "
                "or a pattern such as 'texts/**/*.txt'"
            )
        matches = expand(Path(given))
        if not matches:
            raise InputError(f"no file matches {shown(given)}; give another pattern or a path")
        for path in matches:
            self._add_found(path)

    def _add_found(self, top: Path) -> None:
        """A file, or all files in a folder. What is neither is skipped."""
        waiting = [top]
        while waiting:
            activity.tick()
            path = waiting.pop()
            try:
                status = os.stat(path)
                is_folder = stat.S_ISDIR(status.st_mode)
                folder = path if is_folder else path.parent
                if all((folder / name).is_file() for name in RUN):
                    # A run's output is not a text to learn from, and it changes during training.
                    self._skip(folder, "is the directory of a run")
                elif holds_tokens(folder):
                    self._skip(folder, "holds tokens; give it alone to train on them")
                elif is_folder:
                    if _is_new(path, self._folders):
                        waiting += reversed(list(_entries(path)))
                elif stat.S_ISREG(status.st_mode):
                    self._add_file(path, status.st_size, is_named=False)
                else:
                    self._skip(path, "is not a regular file")
            except OSError as error:
                is_lost = isinstance(error, FileNotFoundError) and path.is_symlink()
                words = "is a symbolic link to nothing" if is_lost else None
                self._skip(path, words or f"cannot be read: {_reason(error)}")

    def _add_file(self, path: Path, size: int, is_named: bool) -> None:
        key = os.path.realpath(path)
        if (known := self.files.get(key)) is None:
            self.files[key] = File(path, size, is_named)
        elif is_named:
            self.files[key] = known._replace(is_named=True)

    def _skip(self, path: Path, reason: str) -> None:
        self.skipped.setdefault(os.path.realpath(path), Skipped(shown(path), reason))


def find(paths: Sequence[str | PathLike[str]]) -> tuple[list[File], list[Skipped]]:
    """The files that paths mean, in the order of the paths, and by name within each of them.

    Also those that were found and are not used.

    InputError if one of the paths means nothing that can be read.
    """
    finder = _Finder()
    with activity.doing("Looking for files", usual=True):
        for path in paths:
            finder.add(os.fspath(path))
    return list(finder.files.values()), list(finder.skipped.values())


def expand(pattern: Path) -> list[Path]:
    """The files and folders that match a pattern, in order; `**` means any number of folders.

    Hidden ones only match a part that begins with a dot.
    """
    level = [Path(pattern.anchor)]
    for part in pattern.relative_to(pattern.anchor).parts:
        if part == "**":
            level = list(dict.fromkeys(below for path in level for below in _folders(path)))
        elif any(mark in part for mark in WILDCARDS):
            level = [child for path in level for child in _matching(path, part)]
        else:
            level = [path / part for path in level if os.path.lexists(path / part)]
    return sorted(level, key=lambda path: path.parts)


def _matching(folder: Path, part: str) -> Iterator[Path]:
    try:
        entries = list(_entries(folder, hidden=part.startswith(".")))
    except OSError:
        return
    yield from (path for path in entries if fnmatch.fnmatch(path.name, part))


def _folders(top: Path) -> Iterator[Path]:
    """A folder and all folders below it, each of them once."""
    waiting, seen = [top], set[str]()
    while waiting:
        activity.tick()
        folder = waiting.pop()
        try:
            if folder.is_dir() and _is_new(folder, seen):
                waiting += reversed(list(_entries(folder)))
                yield folder
        except OSError:
            continue


def _entries(folder: Path, hidden: bool = False) -> Iterator[Path]:
    """The entries of a folder, by name."""
    for name in sorted(os.listdir(folder)):
        if hidden or not name.startswith("."):
            yield folder / name


def _is_new(folder: Path, seen: set[str]) -> bool:
    """True if the folder was not in `seen`; adds it."""
    key = os.path.realpath(folder)
    is_new = key not in seen
    seen.add(key)
    return is_new


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or shown(error)
