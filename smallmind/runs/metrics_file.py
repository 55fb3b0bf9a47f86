"""metrics.jsonl, read from outside, also while a run writes it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from smallmind import durable

STEP = re.compile(rb'\{"step": \d+, "loss": [^,]+, "lr": ')  # how the record of a step begins


def record_of(line: bytes) -> dict[str, Any] | None:
    """A line of the metrics as a dictionary with a step; None if it is cut or damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record else None


class MetricsFile:
    """The metrics of a run, piece by piece: each `read` returns the records since the last one.

    A run that resumes may replace the file: then `read` begins again, and `restarts` counts that.
    With `sparse`, only the last of several step records in a row is read, which takes a tenth of
    the time. `unreadable` are the numbers, from 1, of the lines that are not records, and `partial`
    is the beginning of a line that has not ended: the run is writing it, or was killed.

    The file is open only during `read`: on Windows a run could not replace an open one.
    """

    def __init__(self, path: Path, sparse: bool = False) -> None:
        self.path = path
        self.sparse = sparse
        self.restarts = 0
        self._begin()

    def _begin(self) -> None:
        self.lines = 0  # that have been read
        self.unreadable: list[int] = []
        self.partial = b""
        self._offset = 0  # of what has not been read
        self._last = b""  # the line before it

    def read(self) -> list[dict[str, Any]]:
        """The records since the last call. OSError or ValueError if the file cannot be read."""
        with durable.open_regular(self.path) as file:
            if not self._continues(file):
                self._begin()
                self.restarts += 1
            file.seek(self._offset)
            data = file.read()
        *lines, self.partial = data.split(b"\n")
        records = list(self._sparse(lines) if self.sparse else self._all(lines))
        self.lines += len(lines)
        self._offset += len(data) - len(self.partial)
        self._last = lines[-1] + b"\n" if lines else self._last
        return records

    def _all(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines, self.lines + 1):
            if record := record_of(line):
                yield record
            else:
                self.unreadable.append(number)

    def _sparse(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        steps: list[bytes] = []  # in a row
        for number, line in enumerate(lines, self.lines + 1):
            if STEP.match(line):
                steps.append(line)
                continue
            yield from _last_record(steps)
            steps.clear()
            if record := record_of(line):
                yield record
            else:
                self.unreadable.append(number)
        yield from _last_record(steps)

    def _continues(self, file: BinaryIO) -> bool:
        """Whether the file still has the last line that was read where it was."""
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last


def _last_record(lines: list[bytes]) -> list[dict[str, Any]]:
    """The last line that is a record, in a list."""
    return next(([record] for line in reversed(lines) if (record := record_of(line))), [])
