"""The records of one file with all of their fields, rather than with their text alone."""

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.compressed import PACKED, unpacked
from smallmind.corpus.entry import Entry
from smallmind.corpus.json_records import json_elements, json_lines
from smallmind.corpus.reading import Limits, Reading, shown
from smallmind.corpus.records import kind_of
from smallmind.corpus.shapes import Row
from smallmind.corpus.tables import table_rows

READERS: dict[str, Callable[[Entry], Iterator[Row]]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_elements,
    ".csv": table_rows,
    ".tsv": table_rows,
}
LIMITS = Limits(record=2**22)  # characters: far more than any context has


def read_fields(path: str | PathLike[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the fields of each record, and words for its place, such as "line 7".

    The file is .jsonl, .json, .csv or .tsv, perhaps compressed. InputError if it is anything else,
    damaged or empty.
    """
    path = Path(path)
    name = shown(path)
    try:
        size = path.stat().st_size
    except (OSError, ValueError):
        raise InputError(f"{name} does not exist; give a file of records") from None
    is_empty = True
    with activity.doing(f"Reading {name}", usual=True):
        entry = Entry.of_file(
            str(path), Reading(None, None, LIMITS, size, set(), False), True, size
        )
        if entry.suffix in PACKED and not path.is_dir():
            entry = unpacked(entry)
        if entry.suffix not in READERS:
            raise InputError(
                f"{name} is not a file of records; give one that ends in {', '.join(READERS)}, "
                f"perhaps with {', '.join(PACKED)} after that"
            )
        for record, where in READERS[entry.suffix](entry):
            if not isinstance(record, dict):
                raise InputError(
                    f"{name} has {kind_of(record)} in {where}; each record must be an object with "
                    "named fields"
                )
            is_empty = False
            yield record, where
    if is_empty:
        raise InputError(f"{name} has no records in it; give a file with some")
