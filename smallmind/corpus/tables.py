"""Tables with a header row: comma-separated and tab-separated values."""

import csv
import itertools
from collections.abc import Iterator

from smallmind.checks import InputError
from smallmind.corpus.decoding import decoded
from smallmind.corpus.reading import shown
from smallmind.corpus.records import TextField, lines, record, too_long
from smallmind.corpus.source import Piece, Source

SEPARATORS = ",;\t|"  # that a file with commas in its name may really have


def read_csv(source: Source) -> Iterator[Piece]:
    """Comma-separated values; if the header has no comma, what it has instead separates them."""
    return _read_table(source, SEPARATORS)


def read_tsv(source: Source) -> Iterator[Piece]:
    """Tab-separated values."""
    return _read_table(source, "\t")


def _read_table(source: Source, separators: str) -> Iterator[Piece]:
    """A document per row, from the column of the text. InputError for a damaged row."""
    text = lines(source, decoded(source))
    first = next(text, "")
    separator = next((mark for mark in separators if mark in first), separators[0])
    rows = _rows(source, itertools.chain([first], text), separator)
    names = [name.strip() for name in next((row for _, row in rows if row), [])]
    if not names:
        return
    field, column = TextField(source, "column"), 0
    if len(names) == 1 and not source.reading.field:  # it holds the text, whatever it is called
        field.note(names[0])
    else:
        column = names.index(field.choose(names, "the header row"))
    for number, row in rows:
        if any(row[len(names) :]):
            raise InputError(
                f"{source.name}: the row in line {number:,} has {len(row)} cells and the header "
                f"{len(names)}; put quotes around cells that contain {separator!r}"
            )
        if row:
            yield from record(source, row[column] if column < len(row) else None)


def _rows(source: Source, text: Iterator[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """The number of the line in which a row begins, and its cells."""
    reader = csv.reader(text, delimiter=separator, strict=True)
    while True:
        number = reader.line_num + 1
        # The module's limit holds for all who use it: it is changed for one row at a time.
        previous = csv.field_size_limit(source.reading.limits.record)
        try:
            row = next(reader, None)
        except csv.Error as error:
            where = f"the row in line {number:,}"
            if "field limit" in str(error):
                raise too_long(source, f"a cell of {where}") from None
            raise InputError(
                f"{source.name}: {where} is damaged: {shown(error)}; correct or remove it"
            ) from None
        finally:
            csv.field_size_limit(previous)
        if row is None:
            return
        yield number, row
