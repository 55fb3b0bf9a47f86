"""Tables with a header row: comma-separated and tab-separated values."""

import csv
import itertools
from collections.abc import Iterator

from smallmind.checks import InputError
from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.reading import shown
from smallmind.corpus.records import Records, Row, document_of, lines, too_long

SEPARATORS = ",;\t|"  # that a file with commas in its name may really have


def read_csv(entry: Entry) -> Iterator[Piece]:
    """Comma-separated values; if the header has no comma, what it has instead separates them."""
    return _read_table(entry, SEPARATORS)


def read_tsv(entry: Entry) -> Iterator[Piece]:
    """Tab-separated values."""
    return _read_table(entry, "\t")


def csv_rows(entry: Entry) -> Iterator[Row]:
    """The rows of comma-separated values: their cells by the names of their columns."""
    return _named_rows(entry, SEPARATORS)


def tsv_rows(entry: Entry) -> Iterator[Row]:
    """The rows of tab-separated values: their cells by the names of their columns."""
    return _named_rows(entry, "\t")


def _read_table(entry: Entry, separators: str) -> Iterator[Piece]:
    """A document per row, from the column of the text. InputError for a damaged row."""
    names, rows = _opened(entry, separators)
    if not names:
        return
    records, column = Records(entry, "column"), 0
    shape = records.look_for_turns(names, "the header row")
    if shape:
        pass
    elif len(names) == 1 and not entry.reading.field:  # it holds the text, whatever it is called
        records.note(names[0])
    else:
        column = names.index(records.choose(names, "the header row"))
    for where, row in rows:
        if shape:
            yield from records.pieces(_by_name(names, row), where)
        else:
            yield from document_of(entry, row[column] if column < len(row) else None)


def _named_rows(entry: Entry, separators: str) -> Iterator[Row]:
    names, rows = _opened(entry, separators)
    for where, row in rows:
        yield _by_name(names, row), where


def _by_name(names: list[str], row: list[str]) -> dict[str, str]:
    return dict(itertools.zip_longest(names, row[: len(names)], fillvalue=""))


def _opened(entry: Entry, separators: str) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """The names of the columns, and each row that is not empty, after where it is."""
    text = lines(entry, decoded(entry))
    first = next(text, "")
    separator = next((mark for mark in separators if mark in first), separators[0])
    rows = _rows(entry, itertools.chain([first], text), separator)
    names = [name.strip() for name in next((row for _, row in rows if row), [])]

    def checked() -> Iterator[tuple[str, list[str]]]:
        for number, row in rows:
            if any(row[len(names) :]):
                raise InputError(
                    f"{entry.name}: the row in line {number:,} has {len(row)} cells and the header "
                    f"{len(names)}; put quotes around cells that contain {separator!r}"
                )
            if row:
                yield f"the row in line {number:,}", row

    return names, checked()


def _rows(entry: Entry, text: Iterator[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """The number of the line in which a row begins, and its cells."""
    reader = csv.reader(text, delimiter=separator, strict=True)
    while True:
        number = reader.line_num + 1
        # The module's limit holds for all who use it: it is changed for one row at a time.
        previous = csv.field_size_limit(entry.reading.limits.record)
        try:
            row = next(reader, None)
        except csv.Error as error:
            where = f"the row in line {number:,}"
            if "field limit" in str(error):
                raise too_long(entry, f"a cell of {where}") from None
            raise InputError(
                f"{entry.name}: {where} is damaged: {shown(error)}; correct or remove it"
            ) from None
        finally:
            csv.field_size_limit(previous)
        if row is None:
            return
        yield number, row
