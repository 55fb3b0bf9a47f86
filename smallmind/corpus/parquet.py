"""Parquet files, by way of pyarrow."""

import importlib
import itertools
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from decimal import Decimal
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.json_values import Number
from smallmind.corpus.reading import shown
from smallmind.corpus.records import Records, check_columns
from smallmind.corpus.shapes import OF_LISTS, SHAPE_FIELDS
from smallmind.corpus.turns import TELLING_FIELDS

ROWS_AT_ONCE = 256  # that are converted at once
TEXT_TYPES = ("string", "utf8")  # in the names of types that hold text


def read_parquet(entry: Entry) -> Iterator[Piece]:
    """Yields a document per row, from the column of the text. InputError without pyarrow."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f'{entry.name} needs pyarrow: pip install "smallmind[parquet]"') from None
    records = Records(entry, "column")
    with closing(entry.open()) as file:
        with _naming(entry):
            table = parquet.ParquetFile(file)
            types = {field.name: str(field.type) for field in table.schema_arrow}
            names = list(table.schema_arrow.names)
        check_columns(entry, names)
        known = {*TELLING_FIELDS, *SHAPE_FIELDS, *OF_LISTS}
        telling = [x for x in names if x.casefold() in known or "list<" in types[x]]
        first = next(iter(next(_batches(entry, table, telling), [])), None) if telling else None
        columns = list(records.columns(names, first, "its columns"))
        for name in () if entry.reading.field else names:
            if name not in columns and any(word in types[name] for word in TEXT_TYPES):
                entry.reading.leave_unread(name)
        rows = itertools.chain.from_iterable(_batches(entry, table, columns))
        yield from records.documents((row, f"row {i:,}") for i, row in enumerate(rows, 1))


def _batches(entry: Entry, table: Any, columns: list[str]) -> Iterator[list[Any]]:
    """Yields the rows with these columns, some at a time."""
    with _naming(entry):
        batches = iter(table.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns))
    while True:
        with _naming(entry):
            batch = next(batches, None)
            rows = [_as_json(row) for row in batch.to_pylist()] if batch is not None else []
        if batch is None:
            return
        for field in batch.schema:
            if str(field.type) in ("float", "halffloat"):  # of which Python makes float64
                shorter = np.float32 if str(field.type) == "float" else np.float16
                for row in rows:
                    if row[field.name] is not None:
                        row[field.name] = Number(str(shorter(row[field.name])))
        yield rows


def _as_json(value: Any) -> Any:
    """Returns a value as JSON has it: what is not finite is missing, a decimal keeps its digits."""
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        return None
    if isinstance(value, Decimal):
        return Number(str(value))
    if isinstance(value, list):
        return [_as_json(part) for part in value]
    if isinstance(value, dict):
        return {name: _as_json(part) for name, part in value.items()}
    return value


@contextmanager
def _naming(entry: Entry) -> Iterator[None]:
    """Turns whatever pyarrow raises within the block into an InputError that names the file."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"{entry.name} is damaged, or not a Parquet file: {shown(error)}; download or copy it "
            "again"
        ) from None
