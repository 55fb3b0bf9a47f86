"""Marks of a class: which exercises of which files are solved, each file in a process of its own.

What students have written runs as the person who marks it. An endless loop, a crash, or a file that
takes all memory costs its own mark only. Where somebody may mean harm, use an account for it.
"""

import ast
import csv
import io
import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from smallmind.checks import InputError
from smallmind.lessons import pages, short_name, title
from smallmind.lessons.exercises import exercises
from smallmind.parallel.environment import python

SECONDS = 60.0  # for one exercise
MEMORY = 2 << 30  # bytes of one file
PREPARING = 900.0  # seconds for the page's own code, which may have kernels to compile
MAX_BYTES = 1 << 22  # of a file
POLL = 0.05  # seconds between two looks at a process
SUFFIXES = ".py", ".ipynb"
SOLVED, UNTRIED = "solved", "not tried yet"
PROGRAM = "import sys\nfrom smallmind.lessons.marked import main\nmain(*sys.argv[1:])"


class Submission(NamedTuple):
    """A file of a student, and the page that it is a copy of; None if it is of none."""

    student: str
    path: Path
    page: Path | None


class Mark(NamedTuple):
    """The verdict on one exercise of a file."""

    student: str
    path: Path
    lesson: str
    exercise: int
    verdict: str

    @property
    def sign(self) -> str:
        """The verdict as a word: yes, no, or - if it was not tried."""
        return {SOLVED: "yes", UNTRIED: "-"}.get(self.verdict, "no")


def submissions(directory: Path) -> list[Submission]:
    """Returns the files of a class, by lesson and student. InputError if there are none.

    Students are told apart by their directories or, in `directory` itself, by the names of files.
    """
    if not directory.is_dir():
        raise InputError(f"--check: {directory} is not a directory")
    paths = [path for path in directory.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    parts = {path: path.relative_to(directory).parts for path in paths}
    found = [_submission(path, parts[path]) for path in paths if not _is_hidden(parts[path])]
    if not any(each.page for each in found):
        raise InputError(
            f"--check: {directory} has no copy of a lesson, .py or .ipynb, with its title in it"
        )
    order = [*pages(), None]
    return sorted(found, key=lambda each: (order.index(each.page), each.student, each.path))


def _is_hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith((".", "__")) for part in parts)


def _submission(path: Path, parts: Sequence[str]) -> Submission:
    page = None
    with suppress(OSError):
        if path.stat().st_size <= MAX_BYTES:
            text = path.read_bytes().decode("utf-8", "replace")
            page = next((each for each in pages() if _is_copy(text, each)), None)
    if len(parts) > 1:
        return Submission("/".join(parts[:-1]), path, page)
    name = path.stem.replace(page.stem, "") if page else path.stem
    return Submission(name.strip("-_. ()") or path.stem, path, page)


def _is_copy(text: str, page: Path) -> bool:
    """Tells whether a file has the title of a page, as a heading in a script or in a notebook."""
    heading = rf"(# # |\"# ){re.escape(title(page))}(\r?$|\\n|\")"
    return re.search(heading, text, re.MULTILINE) is not None


def numbers_of(page: Path) -> list[int]:
    """Returns the numbers of the exercises of a page."""
    return [each.number for each in exercises(ast.parse(page.read_text(encoding="utf-8")))]


def marks_of(
    submission: Submission, seconds: float = SECONDS, memory: int = MEMORY
) -> Iterator[Mark]:
    """Yields the verdict on each exercise of a file, as they come.

    `seconds` limit each exercise, `memory` the file, in bytes. The process that judges is ended
    with the first exercise that takes more, and another one judges those that are left.
    """
    assert submission.page is not None
    left = numbers_of(submission.page)
    while left:
        with _Judging(submission, left, seconds, memory) as judging:
            for number, verdict in judging.verdicts():
                left.remove(number)
                name = short_name(submission.page)
                yield Mark(submission.student, submission.path, name, number, verdict)


class _Judging:
    """A process that judges exercises, until it ends or has to be ended."""

    def __init__(
        self, submission: Submission, numbers: list[int], seconds: float, memory: int
    ) -> None:
        self.numbers, self.seconds, self.memory = list(numbers), seconds, memory
        arguments = [submission.page, submission.path.resolve(), seconds, memory, *numbers]
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            python(PROGRAM, *map(str, arguments)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self._folder.name,  # where it leaves what it writes
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # so that what it starts ends with it
        )
        self._replies: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "_Judging":
        return self

    def __exit__(self, *_: object) -> None:
        children: list[psutil.Process] = []
        with suppress(psutil.Error):
            children = psutil.Process(self._process.pid).children(recursive=True)
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        if hasattr(os, "killpg"):
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._reader.join(1.0)  # something that escaped may still hold the other end
        if self._process.stdout and not self._reader.is_alive():
            self._process.stdout.close()
        self._folder.cleanup()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._replies.put(line)
        self._replies.put(b"")

    def verdicts(self) -> Iterator[tuple[int, str]]:
        """Yields the number and the verdict of each exercise, until one has to be stopped."""
        current, left = self.numbers[0], list(self.numbers)
        end, limit = time.monotonic() + PREPARING, PREPARING
        while left:
            try:
                line = self._replies.get(timeout=POLL)
            except queue.Empty:
                if time.monotonic() > end:
                    yield current, f"stopped: it took more than {limit:g} s"
                    return
                if self._bytes() > self.memory:
                    yield current, f"stopped: it took more than {self.memory / 2**30:.1f} GB"
                    return
                continue
            try:
                number, verdict = json.loads(line)
            except (ValueError, TypeError, RecursionError):
                yield current, "stopped: it ended the process that judges"
                return
            if number not in left:
                continue
            current = number
            limit = self.seconds if verdict is None else PREPARING
            end = time.monotonic() + limit
            if verdict is not None:
                left.remove(number)
                current = left[0] if left else number
                yield number, str(verdict)

    def _bytes(self) -> int:
        """Returns the memory of the process and of those that it has started."""
        total = 0
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    total += each.memory_info().rss
        return total


def to_csv(marks: Iterable[Mark]) -> str:
    """Returns a row for each exercise of each file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["student", "lesson", "exercise", "solved", "verdict", "file"])
    for mark in marks:
        row: list[Any] = [mark.student, mark.lesson, mark.exercise, mark.sign]
        writer.writerow(_harmless([*row, mark.verdict, str(mark.path)]))
    return text.getvalue()


def _harmless(row: list[Any]) -> list[Any]:
    """Puts a quote before a name that a spreadsheet would take for a formula."""
    return [f"'{x}" if str(x).startswith(("=", "+", "-", "@")) and x != "-" else x for x in row]


def first_failure(marks: Sequence[Mark]) -> Mark | None:
    """Returns the first of a file's marks that was tried and is not solved, if there is one."""
    return next((mark for mark in marks if mark.sign == "no"), None)
