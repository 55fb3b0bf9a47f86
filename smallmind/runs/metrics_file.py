"""metrics.jsonl, read from outside, also while a run writes it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smallmind.checks import from_json, whole
from smallmind.files import durable

# The record of a step; those of steps in a row only differ in their numbers.
STEP = re.compile(rb'\{"step": \d+, (?:"kind": "step", )?"loss": [^,\n]+, "lr": [^\n]*\n')


def record_of(line: bytes) -> dict[str, Any] | None:
    """Returns a line of the metrics as a dictionary with a step; None if it is cut or damaged."""
    try:
        record = from_json(line, strict=False)
        whole(record["step"])
    except (ValueError, TypeError, KeyError):
        return None
    return record if isinstance(record, dict) else None


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

    def read(self) -> Iterator[dict[str, Any]]:
        """Returns the records since the last call, to be consumed before the next one."""
        with durable.open_regular(self.path) as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:  # it is another file
                self._begin()
                self.restarts += 1
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        whole, self.partial = data[:end], data[end:]
        self._offset += end
        self._last = whole[whole.rfind(b"\n", 0, -1) + 1 :] or self._last
        return self._records(whole)  # one by one: a hundred thousand take 100 MB

    def _records(self, data: bytes) -> Iterator[dict[str, Any]]:
        offset = 0
        while offset < len(data):
            first = offset
            while self.sparse and (step := STEP.match(data, offset)):
                self.lines += 1
                offset = step.end()
            if offset > first:
                yield from _last_record(data[first:offset])
                continue
            end = data.index(b"\n", offset)
            self.lines += 1
            if record := record_of(data[offset:end]):
                yield record
            else:
                self.unreadable.append(self.lines)
            offset = end + 1


def _last_record(lines: bytes) -> list[dict[str, Any]]:
    """Returns the last line that is a record, in a list."""
    end = len(lines) - 1
    while end > 0:
        begin = lines.rfind(b"\n", 0, end) + 1
        if record := record_of(lines[begin:end]):
            return [record]
        end = begin - 1
    return []
