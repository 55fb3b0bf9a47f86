"""Jupyter notebooks: the text and code of their cells, without outputs and pictures.

Format: https://nbformat.readthedocs.io/en/latest/format_description.html
"""

from collections.abc import Iterator
from typing import Any

from smallmind.corpus.entry import Entry, Piece, document
from smallmind.corpus.json_records import json_elements
from smallmind.corpus.reading import Unusable


def read_notebook(entry: Entry) -> Iterator[Piece]:
    """Yields the cells of a notebook, with a blank line between them, as one document."""
    for notebook, _ in json_elements(entry):
        texts = [text for text in map(_source, _cells(entry, notebook)) if text.strip()]
        entry.reading.note("read the cells of notebooks, without outputs and attachments,")
        yield from document(["\n\n".join(texts)], entry.reading.limits.piece)


def _cells(entry: Entry, notebook: Any) -> list[Any]:
    """Returns the cells; before format 4 they are in worksheets."""
    if isinstance(notebook, dict):
        sheets = notebook.get("worksheets", [notebook])
        if isinstance(sheets, list) and all(isinstance(sheet, dict) for sheet in sheets):
            cells = [sheet.get("cells") for sheet in sheets]
            if all(isinstance(each, list) for each in cells):
                return [cell for each in cells if each for cell in each]
    raise Unusable(entry.name, "has no cells of a notebook", "save it again with Jupyter")


def _source(cell: Any) -> str:
    """Returns the text of a cell, which may be in lines."""
    source = cell.get("source", cell.get("input", "")) if isinstance(cell, dict) else ""
    lines = source if isinstance(source, list) else [source]
    return "".join(line for line in lines if isinstance(line, str))
