"""Parquet files, by way of pyarrow."""

import importlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from smallmind.checks import InputError
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.reading import shown
from smallmind.corpus.records import Records
from smallmind.corpus.turns import TELLING

ROWS = 256  # that are converted at once


def read_parquet(entry: Entry) -> Iterator[Piece]:
    """A document per row, from the column of the text.

    InputError without pyarrow, and for a damaged file.
    """
    parquet = _pyarrow(entry)
    records = Records(entry, "column")
    with closing(entry.open()) as file:
        with _naming(entry):
            table = parquet.ParquetFile(file)
            names = list(table.schema_arrow.names)
        telling = [name for name in names if name.casefold() in TELLING]
        first = next(iter(next(_batches(entry, table, telling), [])), None) if telling else None
        shape = records.look_for_turns(names, "its columns", first)
        columns = list(shape.names) if shape else [records.choose(names, "its columns")]
        number = 0
        for rows in _batches(entry, table, columns):
            for row in rows:
                number += 1
                where = f"row {number:,}"
                yield from records.pieces(row, where)


def _pyarrow(entry: Entry) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f'{entry.name} needs pyarrow: pip install "smallmind[parquet]"') from None


def _batches(entry: Entry, table: Any, columns: list[str]) -> Iterator[list[Any]]:
    """The rows with these columns, some at a time."""
    with _naming(entry):
        batches = iter(table.iter_batches(batch_size=ROWS, columns=columns))
    while True:
        with _naming(entry):
            batch = next(batches, None)
            rows = batch.to_pylist() if batch is not None else []
        if batch is None:
            return
        yield rows


@contextmanager
def _naming(entry: Entry) -> Iterator[None]:
    """Whatever pyarrow raises within the block becomes an InputError that names the file."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"{entry.name} is damaged, or not a Parquet file: {shown(error)}; download or copy it "
            "again"
        ) from None
