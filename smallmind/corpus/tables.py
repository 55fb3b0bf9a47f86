"""Tables with a header row: comma-separated and tab-separated values."""

import csv
import itertools
import re
from collections.abc import Iterator

from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.reading import Unusable, shown
from smallmind.corpus.records import Records, check_columns, lines, too_long
from smallmind.corpus.shapes import Row

SEPARATORS = ",;\t|"  # that a file with commas in its name may really have
TAB = "\t"
# A first line that Excel reads and writes.
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\r?\n?', re.IGNORECASE)
QUOTED = re.compile(r'"[^"]*"?')


def read_table(entry: Entry) -> Iterator[Piece]:
    """Yields a document per row, from the column of the text. Unusable for a damaged row."""
    names, rows = _opened(entry)
    if not names:
        return
    records = Records(entry, "column")
    first = list(itertools.islice(rows, 1))
    records.columns(names, first[0][0] if first else None, "the header row", are_texts=True)
    yield from records.documents(itertools.chain(first, rows))


def table_rows(entry: Entry) -> Iterator[Row]:
    """Returns the rows of a table: their cells by the names of their columns."""
    return _opened(entry)[1]


def _opened(entry: Entry) -> tuple[list[str], Iterator[Row]]:
    """-> the names of the columns, and each row that is not empty.

    In .tsv tabs separate, and quotation marks are text; else commas do or, if the header has none,
    what it has instead.
    """
    separators = TAB if entry.suffix == ".tsv" else SEPARATORS
    text = lines(entry)
    first, before = next(text, ""), 0
    if chosen := SEPARATOR_LINE.fullmatch(first):
        separator, first, before = chosen[1], next(text, ""), 1
    else:
        unquoted = QUOTED.sub("", first)
        separator = next((mark for mark in separators if mark in unquoted), separators[0])
    # The format has no quotation marks, but some programs put them around every cell.
    cells = first.rstrip("\r\n").split(TAB)
    has_quotes = separators != TAB or bool(chosen) or all(map(QUOTED.fullmatch, cells))
    rows = _rows(entry, itertools.chain([first], text), separator, has_quotes)
    names = [name.strip() for name in next((row for _, row in rows if row), [])]
    check_columns(entry, names)

    def checked() -> Iterator[Row]:
        for number, row in rows:
            where = f"the row in line {number + before:,}"
            if any(row[len(names) :]):
                advice = f"put quotes around cells that contain {separator!r}"
                if not has_quotes:
                    advice = "remove tabs from its cells, or put quotes around them in a .csv file"
                reason = f"has {len(row)} cells and the header {len(names)}"
                raise Unusable(entry.name, reason, advice, where)
            if not has_quotes and any(cell.startswith('"') for cell in row):
                entry.reading.note(
                    "quotation marks around cells were read as text, as .tsv has no others (rename "
                    "a file to .csv to remove them)"
                )
            if row:
                cells = itertools.zip_longest(names, row[: len(names)], fillvalue="")
                yield dict(cells), where

    return names, checked()


def _rows(
    entry: Entry, text: Iterator[str], separator: str, has_quotes: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the line in which a row begins, and its cells."""
    reader = csv.reader(
        text,
        delimiter=separator,
        strict=True,
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
    )
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
            reason = f"is damaged: {shown(error)}"
            raise Unusable(entry.name, reason, "correct or remove it", where) from None
        finally:
            csv.field_size_limit(previous)
        if row is None:
            return
        yield number, row
