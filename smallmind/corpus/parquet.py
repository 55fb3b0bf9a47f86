"""Parquet files, by way of pyarrow."""

import importlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from smallmind.checks import InputError
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.reading import shown
from smallmind.corpus.records import TextField, record

ROWS = 256  # that are converted at once


def read_parquet(entry: Entry) -> Iterator[Piece]:
    """A document per row, from the column of the text.

    InputError without pyarrow, and for a damaged file.
    """
    parquet = _pyarrow(entry)
    field = TextField(entry, "column")
    with closing(entry.open()) as file:
        with _naming(entry):
            table = parquet.ParquetFile(file)
            names = list(table.schema_arrow.names)
        column = field.choose(names, "its columns")
        number = 0
        for texts in _batches(entry, table, column):
            for text in texts:
                number += 1
                yield from record(entry, field.text_of({column: text}, f"row {number:,}"))


def _pyarrow(entry: Entry) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f'{entry.name} needs pyarrow: pip install "smallmind[parquet]"') from None


def _batches(entry: Entry, table: Any, column: str) -> Iterator[list[Any]]:
    """The values of a column, some rows at a time."""
    with _naming(entry):
        batches = iter(table.iter_batches(batch_size=ROWS, columns=[column]))
    while True:
        with _naming(entry):
            batch = next(batches, None)
            texts = batch.column(0).to_pylist() if batch is not None else []
        if batch is None:
            return
        yield texts


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
