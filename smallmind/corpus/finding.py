"""Finding the files that paths, folders and globs mean, always in the same order."""

import fnmatch
import itertools
import os
import re
import stat
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, count_of
from smallmind.console import activity
from smallmind.corpus.entry import PACKED_SUFFIXES, RECORD_SUFFIXES, TEXT_SUFFIX
from smallmind.corpus.ignoring import Rules, is_ignored, rules_of
from smallmind.corpus.reading import Skipped, not_regular, shown
from smallmind.corpus.shards import holds_tokens

WILDCARDS = "*?["
RUN_FILES = ("config.json", "metrics.jsonl")  # files in the directory of a run
TRAINING_NAME = re.compile(r"(?:^|[_.-])train(?:ing)?(?:[_.-]|$)", re.IGNORECASE)
TEST_NAME = re.compile(r"(?:^|[_.-])(?:test|eval|dev|val(?:id|idation)?)(?:[_.-]|$)", re.IGNORECASE)
SPLITS = re.compile("train|test|eval|dev|val", re.IGNORECASE)  # words that these names have
# Folders with what others wrote, which few mean to learn from.
FOLDERS_OF_OTHERS = ("node_modules", "bower_components", "site-packages", "__pycache__", "venv")
EXCLUDE_ADVICE = "to leave them out: --exclude"
NAMES_PER_BLOCK = 1024
DATA_SUFFIXES = {*PACKED_SUFFIXES, *RECORD_SUFFIXES, TEXT_SUFFIX}


class File(NamedTuple):
    """A file with texts."""

    name: str  # its path
    size: int  # bytes
    is_named: bool  # rather than found in a folder or by a glob

    @property
    def is_compressed(self) -> bool:
        """True if the file takes more space when unpacked."""
        return os.path.splitext(self.name)[1].lower() in PACKED_SUFFIXES


class FileList(Sequence[File]):
    """Files in the order in which they were found, in memory that hardly grows with their number.

    Each has a key, its path without symbolic links.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []  # names, compressed
        self._names: list[str] = []  # those that are in no block yet
        self._sizes, self._keys = array("q"), array("q")  # in bytes; hashes of the keys
        self._named: set[int] = set()  # the numbers of files that are named

    def append(self, file: File, key: str) -> None:
        """Adds a file after all others."""
        if file.is_named:
            self._named.add(len(self._sizes))
        self._sizes.append(file.size)
        self._keys.append(hash(key))
        self._names.append(file.name)
        if len(self._names) == NAMES_PER_BLOCK:
            names = "\0".join(self._names).encode("utf-8", "surrogatepass")
            self._blocks.append(zlib.compress(names, 1))
            self._names = []

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[File]:
        unpacked = (zlib.decompress(x).decode("utf-8", "surrogatepass") for x in self._blocks)
        names = itertools.chain.from_iterable(block.split("\0") for block in unpacked)
        each = zip(itertools.chain(names, self._names), self._sizes, strict=True)
        for number, (name, size) in enumerate(each):
            yield File(name, size, number in self._named)

    def __getitem__(self, number: Any) -> Any:
        return next(itertools.islice(self, number, None))

    def each_once(self) -> "FileList":
        """Leaves out all but the first of each key, which is named if one of them is."""
        keys, counts = np.unique(np.array(self._keys), return_counts=True)
        several = set(keys[counts > 1].tolist())
        if not several:
            return self
        alike = [file for file, key in zip(self, self._keys, strict=True) if key in several]
        named = {os.path.realpath(file.name) for file in alike if file.is_named}
        once, known = FileList(), set[str]()
        for file, key in zip(self, self._keys, strict=True):
            path = os.path.realpath(file.name) if key in several else file.name
            if path not in known:
                once.append(file._replace(is_named=file.is_named or path in named), path)
            if key in several:
                known.add(path)
        return once


class Found(NamedTuple):
    """The result of a search."""

    files: Sequence[File]
    skipped: list[Skipped]
    notes: list[str]  # what was excluded, and what nobody may mean to read


class _Finder:
    """Collects files, each of them once."""

    def __init__(self, exclude: Sequence[str], include: Sequence[str], gitignore: bool) -> None:
        self.excluded = dict.fromkeys(exclude, 0)  # how many files and folders a pattern excludes
        self.included = dict.fromkeys(include, 0)  # how many files of folders a pattern includes
        self.ignored = 0  # files and folders that a .gitignore names
        self._obeys_gitignore = gitignore
        # The real path of a folder, the reason to skip it, and its rules, None if it is ignored.
        self._known: dict[tuple[str, str], tuple[str, str, tuple[Rules, ...] | None]] = {}
        self.files = FileList()
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
        if _matches(self.excluded, name, Path(name).parts):
            return
        if stat.S_ISDIR(status.st_mode):
            self._add_found(os.fspath(Path(name)), os.fspath(Path(name)))
        elif stat.S_ISREG(status.st_mode):
            file = File(os.fspath(Path(name)), status.st_size, is_named=True)
            self.files.append(file, os.path.realpath(name))
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
        root = os.fspath(_fixed(Path(name)))
        for path in matches:
            if not _matches(self.excluded, os.fspath(path), path.parts):
                top = os.fspath(path)
                self._add_found(os.path.join(root, top) if root == os.curdir else top, root)

    def _add_found(self, top: str, root: str) -> None:
        """Adds a file, or all in a folder; skips what is neither, and links out of `root`."""
        within, parent = os.path.realpath(root), os.path.dirname(top)
        facts, names = self._folder(parent, root), iter([os.path.basename(top)])
        waiting = [(parent, facts, names)]  # folders of which names remain, the innermost last
        while waiting:
            activity.tick()
            parent, (real, reason, rules), names = waiting[-1]
            if (name := next(names, None)) is None:
                del waiting[-1]
                continue
            path = os.path.join(parent, name)
            try:
                if self.excluded and path != top and _matches(self.excluded, path, (name,)):
                    continue
                status = os.lstat(path)
                is_link = stat.S_ISLNK(status.st_mode)
                is_folder = stat.S_ISDIR(status.st_mode)
                if (
                    rules != ()
                    and path != root
                    and (rules is None or is_ignored(rules, name, is_folder))
                ):
                    self.ignored += 1
                    continue
                if is_link:
                    status = os.stat(path)
                    is_folder = stat.S_ISDIR(status.st_mode)
                if (path == top or is_link) and not _is_within(Path(path), within):
                    self._skip(path, f"is a symbolic link that leads out of {shown(root)}")
                elif is_folder:
                    inner = self._folder(path, root)
                    if inner[1]:
                        self._skip(path, inner[1])
                    elif inner[0] not in self._folders:
                        self._folders.add(inner[0])
                        waiting.append((path, inner, iter(_names(path))))
                elif reason:
                    self._skip(parent, reason)
                elif not stat.S_ISREG(status.st_mode):
                    self._skip(path, "is not a regular file")
                elif not self.included or _matches(self.included, path, Path(path).parts):
                    key = os.path.realpath(path) if is_link else os.path.join(real, name)
                    self.files.append(File(path, status.st_size, is_named=False), key)
            except OSError as error:
                is_lost = isinstance(error, FileNotFoundError) and os.path.islink(path)
                words = "is a symbolic link to nothing" if is_lost else None
                self._skip(path, words or f"cannot be read: {_reason(error)}")

    def _folder(self, folder: str, root: str) -> tuple[str, str, tuple[Rules, ...] | None]:
        """-> the real path of a folder, the reason to skip it or "", its rules if it is read.

        Those above `root` say nothing about `root` itself, which somebody has named.
        """
        if (folder, root) in self._known:
            return self._known[folder, root]
        reason = ""
        if all(os.path.isfile(os.path.join(folder, name)) for name in RUN_FILES):
            # A run's output is not a text to learn from, and it changes during training.
            reason = "is the directory of a run"
        elif holds_tokens(folder):
            reason = "contains tokens; give only this folder to train on them"
        rules: tuple[Rules, ...] | None = ()
        above, name = os.path.split(folder)
        if self._obeys_gitignore and folder == root:
            rules = rules_of(folder or ".", None)
        elif self._obeys_gitignore and folder.startswith(os.path.join(root, "")):
            rules = self._folder(above, root)[2]
            if rules is not None:
                is_out = is_ignored(rules, name, is_folder=True)
                rules = None if is_out else rules_of(folder, rules, name)
        self._known[folder, root] = found = os.path.realpath(folder), reason, rules
        return found

    def _skip(self, path: str, reason: str) -> None:
        self.skipped.setdefault(os.path.realpath(path), Skipped(shown(Path(path)), reason))


def _matches(counts: dict[str, int], name: str, parts: Sequence[str]) -> bool:
    """-> True if a pattern matches a path, or without a slash one of these parts; counts it."""
    for pattern in counts:
        wanted, names = pattern.rstrip("/"), parts
        if "/" in wanted:
            path = Path(name)
            names = [f"/{each.as_posix()}" for each in (path, *path.parents)]
            wanted = f"*/{wanted.lstrip('/')}"
        if any(fnmatch.fnmatch(each, wanted) for each in names):
            counts[pattern] += 1
            return True
    return False


def find(
    paths: Sequence[str | PathLike[str]],
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    gitignore: bool = True,
) -> Found:
    """-> the files that paths mean, in the order of the paths, and by name within each of them.

    A pattern in `exclude` matches the name of a file or folder or, if it has a slash, a path as it
    is found. With `include`, only files that one of its patterns matches, or whose folder it
    matches, are read of folders and globs. InputError if one of the paths means nothing that can be
    read.
    """
    finder = _Finder(exclude, include, gitignore)
    with activity.doing("Looking for files", usual=True):
        for path in paths:
            finder.add(os.fspath(path))
    files = finder.files.each_once()
    counts = [("Excluded", finder.excluded, "path"), ("Included", finder.included, "file")]
    notes = [
        f"{label} by {shown(pattern, 60)!r}: {count_of(n, thing) if n else 'nothing'}"
        for label, found, thing in counts
        for pattern, n in found.items()
    ]
    if n := finder.ignored:
        notes.append(
            f"Left out: {count_of(n, 'path')} listed in .gitignore; --no-gitignore reads them"
        )
    return Found(files, list(finder.skipped.values()), [*notes, *_unwanted(files)])


def _unwanted(files: Sequence[File]) -> Iterator[str]:
    """Yields notes about what few people mean to learn from, by the names of files and folders."""
    folders = Counter[str]()
    splits: list[tuple[tuple[str, ...], str]] = []
    for folder, name in (os.path.split(file.name) for file in files):
        folders[folder] += 1
        # The names of files that tell nothing of a split are not kept: there may be many. To look
        # for words is much faster than the expressions.
        is_likely = SPLITS.search(name) and os.path.splitext(name)[1].lower() in DATA_SUFFIXES
        if is_likely and (TRAINING_NAME.search(name) or TEST_NAME.search(name)):
            splits.append((Path(folder).parts, name))
    paths = {Path(folder).parts: n for folder, n in folders.items()}
    for name in FOLDERS_OF_OTHERS:
        if n := sum(n for parts, n in paths.items() if name in parts):
            yield f"The texts include {count_of(n, 'file')} from {name}; {EXCLUDE_ADVICE} {name}"
    inner = ((parts[:i], part) for parts in paths for i, part in enumerate(parts))
    splits += dict.fromkeys(inner)
    trained = {folder for folder, part in splits if TRAINING_NAME.search(part)}
    tests = (part for folder, part in splits if folder in trained and TEST_NAME.search(part))
    if names := [shown(name, 60) for name in dict.fromkeys(tests)]:
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        yield f"The texts include a test split, {names[0]}{more}; {EXCLUDE_ADVICE} {names[0]}"


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
    with suppress(OSError):
        names = _names(folder, hidden=part.startswith("."))
        yield from (folder / name for name in names if fnmatch.fnmatch(name, part))


def _folders(top: Path) -> Iterator[Path]:
    """Yields a folder and all folders below it, each of them once."""
    waiting, seen, within = [top], set[str](), os.path.realpath(top)
    while waiting:
        activity.tick()
        folder = waiting.pop()
        real = os.path.realpath(folder)
        with suppress(OSError):
            if folder.is_dir() and _is_within(folder, within) and real not in seen:
                seen.add(real)
                waiting += [folder / name for name in reversed(_names(folder))]
                yield folder


def _names(folder: str | Path, hidden: bool = False) -> list[str]:
    return sorted(x for x in os.listdir(folder) if hidden or not x.startswith("."))


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or shown(error)
