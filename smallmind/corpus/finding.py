"""Finding the files that paths, folders and globs mean, always in the same order."""

import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from smallmind.checks import InputError, count_of
from smallmind.console import activity
from smallmind.corpus.entry import PACKED_SUFFIXES, RECORD_SUFFIXES, TEXT_SUFFIX
from smallmind.corpus.reading import Skipped, not_regular, shown
from smallmind.corpus.shards import holds_tokens

WILDCARDS = "*?["
RUN_FILES = ("config.json", "metrics.jsonl")  # files in the directory of a run
TRAINING_NAME = re.compile(r"(?:^|[_.-])train(?:ing)?(?:[_.-]|$)", re.IGNORECASE)
TEST_NAME = re.compile(r"(?:^|[_.-])(?:test|eval|dev|val(?:id|idation)?)(?:[_.-]|$)", re.IGNORECASE)
# Folders with what others wrote, and files that programs write, which few mean to learn from.
FOLDERS_OF_OTHERS = ("node_modules", "bower_components", "site-packages", "__pycache__", "venv")
MADE_NAME = re.compile(r".*[.-]min\.(js|css|mjs)|.*\.(js|css)\.map|package-lock\.json|.*\.lock")
EXCLUDE_ADVICE = "to leave them out: --exclude"
DATA_SUFFIXES = {*PACKED_SUFFIXES, *RECORD_SUFFIXES, TEXT_SUFFIX}


class File(NamedTuple):
    """A file with texts."""

    path: Path
    size: int  # bytes
    is_named: bool  # rather than found in a folder or by a glob

    @property
    def is_compressed(self) -> bool:
        """True if the file takes more space when unpacked."""
        return self.path.suffix.lower() in PACKED_SUFFIXES


class Found(NamedTuple):
    """The result of a search."""

    files: list[File]
    skipped: list[Skipped]
    notes: list[str]  # what was excluded, and what nobody may mean to read


class _Finder:
    """Collects files, each of them once."""

    def __init__(self, exclude: Sequence[str]) -> None:
        self.excluded = dict.fromkeys(exclude, 0)  # how many files and folders a pattern excludes
        self.files: dict[str, File] = {}  # by the path without symbolic links
        self._folders: set[str] = set()  # the same of folders: links may lead back to them
        self.skipped: dict[str, Skipped] = {}

    def add(self, name: str) -> None:
        """Adds the files that a path means. InputError if there is nothing, or no file."""
        try:
            status = os.stat(name)
            if stat.S_ISDIR(status.st_mode):
                os.listdir(name)  # OSError if it cannot be read
        except (FileNotFoundError, NotADirectoryError):
            self._add_glob(name)
            return
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {shown(name)}: {_reason(error)}") from None
        if self._is_excluded(Path(name), Path(name).parts):
            return
        if stat.S_ISDIR(status.st_mode):
            self._add_found(Path(name), Path(name))
        elif stat.S_ISREG(status.st_mode):
            self._add_file(Path(name), status.st_size, is_named=True)
        else:
            raise InputError(not_regular(name))

    def _add_glob(self, name: str) -> None:
        if not any(mark in name for mark in WILDCARDS):
            raise InputError(
                f"{shown(name) or repr(name)} does not exist; give the path of a file or folder, "
                "or a pattern such as 'texts/**/*.txt'"
            )
        matches = expand(Path(name))
        if not matches:
            raise InputError(f"no file matches {shown(name)}; give another pattern or a path")
        root = _fixed(Path(name))
        for path in matches:
            if not self._is_excluded(path, path.parts):
                self._add_found(path, root)

    def _add_found(self, top: Path, root: Path) -> None:
        """Adds a file, or all in a folder; skips what is neither, and links out of `root`."""
        waiting, within = [top], os.path.realpath(root)
        while waiting:
            activity.tick()
            path = waiting.pop()
            try:
                if path != top and self._is_excluded(path, path.parts[-1:]):
                    continue
                status = os.stat(path)
                if (path == top or path.is_symlink()) and not _is_within(path, within):
                    self._skip(path, f"is a symbolic link that leads out of {shown(root)}")
                    continue
                is_folder = stat.S_ISDIR(status.st_mode)
                folder = path if is_folder else path.parent
                if all((folder / name).is_file() for name in RUN_FILES):
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

    def _is_excluded(self, path: Path, parts: Sequence[str]) -> bool:
        """-> True if a pattern matches the path, or without a slash one of these parts of it."""
        for pattern in self.excluded:
            wanted, names = pattern.rstrip("/"), parts
            if "/" in wanted:
                names = [f"/{each.as_posix()}" for each in (path, *path.parents)]
                wanted = f"*/{wanted.lstrip('/')}"
            if any(fnmatch.fnmatch(name, wanted) for name in names):
                self.excluded[pattern] += 1
                return True
        return False

    def _add_file(self, path: Path, size: int, is_named: bool) -> None:
        key = os.path.realpath(path)
        if (known := self.files.get(key)) is None:
            self.files[key] = File(path, size, is_named)
        elif is_named:
            self.files[key] = known._replace(is_named=True)

    def _skip(self, path: Path, reason: str) -> None:
        self.skipped.setdefault(os.path.realpath(path), Skipped(shown(path), reason))


def find(paths: Sequence[str | PathLike[str]], exclude: Sequence[str] = ()) -> Found:
    """-> the files that paths mean, in the order of the paths, and by name within each of them.

    A pattern in `exclude` matches the name of a file or folder or, if it has a slash, a path as it
    is found. InputError if one of the paths means nothing that can be read.
    """
    finder = _Finder(exclude)
    with activity.doing("Looking for files", usual=True):
        for path in paths:
            finder.add(os.fspath(path))
    files = list(finder.files.values())
    notes = [
        f"Excluded by {shown(pattern, 60)!r}: {count_of(n, 'path') if n else 'nothing'}"
        for pattern, n in finder.excluded.items()
    ]
    return Found(files, list(finder.skipped.values()), [*notes, *_unwanted(files)])


def _unwanted(files: Sequence[File]) -> Iterator[str]:
    """Yields notes about what few people mean to learn from, by the names of files and folders."""
    paths = [file.path.parts for file in files]
    for name in FOLDERS_OF_OTHERS:
        if n := sum(name in parts for parts in paths):
            yield f"Among the texts: {count_of(n, 'file')} of {name}; {EXCLUDE_ADVICE} {name}"
    made = [parts[-1] for parts in paths if MADE_NAME.fullmatch(parts[-1])]
    if made:
        yield (
            f"Among the texts: {count_of(len(made), 'file')} that programs have made, such as "
            f"{shown(made[0], 60)}; {EXCLUDE_ADVICE} PATTERN"
        )
    splits = [
        (parts[:i], part)
        for parts in paths
        for i, part in enumerate(parts)
        if i < len(parts) - 1 or os.path.splitext(part)[1].lower() in DATA_SUFFIXES
    ]
    trained = {folder for folder, part in splits if TRAINING_NAME.search(part)}
    tests = (part for folder, part in splits if folder in trained and TEST_NAME.search(part))
    if names := [shown(name, 60) for name in dict.fromkeys(tests)]:
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        yield f"Among the texts: a split for tests, {names[0]}{more}; {EXCLUDE_ADVICE} {names[0]}"


def _fixed(pattern: Path) -> Path:
    """Returns the folder that a pattern begins with, in which all of its matches are."""
    parts = itertools.takewhile(lambda part: not any(x in part for x in WILDCARDS), pattern.parts)
    return Path(*parts)


def _is_within(path: Path, folder: str) -> bool:
    real = os.path.realpath(path)
    return real == folder or real.startswith(os.path.join(folder, ""))


def expand(pattern: Path) -> list[Path]:
    """-> what matches a pattern, in order; `**` is any number of folders, `*` nothing hidden."""
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
    """Yields a folder and all folders below it, each of them once."""
    waiting, seen, within = [top], set[str](), os.path.realpath(top)
    while waiting:
        activity.tick()
        folder = waiting.pop()
        try:
            if folder.is_dir() and _is_within(folder, within) and _is_new(folder, seen):
                waiting += reversed(list(_entries(folder)))
                yield folder
        except OSError:
            continue


def _entries(folder: Path, hidden: bool = False) -> Iterator[Path]:
    """Yields the entries of a folder, by name."""
    for name in sorted(os.listdir(folder)):
        if hidden or not name.startswith("."):
            yield folder / name


def _is_new(folder: Path, seen: set[str]) -> bool:
    """Returns True if the folder was not in `seen`; adds it."""
    key = os.path.realpath(folder)
    is_new = key not in seen
    seen.add(key)
    return is_new


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or shown(error)
