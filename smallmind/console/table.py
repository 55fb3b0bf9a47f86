"""Tables without lines: what objects show of themselves in a REPL, and in a notebook as HTML."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smallmind.console.live_line import printable


@dataclass(frozen=True)
class Table:
    """A title above rows of cells, all of them text.

    `align` has a character for each column: < for left, > for right; by default only the first
    column is left-aligned. The row with the number `best` is bold in HTML.
    """

    title: str
    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    align: str = ""
    best: int | None = None

    def __str__(self) -> str:
        every = [*([self.heads] if self.heads else []), *self.rows]
        wide = [max(map(len, column)) for column in zip(*every, strict=True)]
        lines = [self.title] if self.title else []
        for row in every:
            cells = [
                f"{cell:{side}{width}}"
                for cell, side, width in zip(row, self._sides(row), wide, strict=True)
            ]
            lines.append(f"  {'  '.join(cells)}".rstrip())
        return printable("\n".join(lines))

    def html(self) -> str:
        """A <table> in the colours of its page. What the cells hold is text, not markup."""
        parts = [f"<caption>{escape(self.title)}</caption>"] if self.title else []
        if self.heads:
            parts.append(f"<thead>{self._row(self.heads, 'th')}</thead>")
        rows = (self._row(row, "td", number == self.best) for number, row in enumerate(self.rows))
        return f"<table>{''.join(parts)}<tbody>{''.join(rows)}</tbody></table>"

    def _row(self, cells: Sequence[str], tag: str, is_bold: bool = False) -> str:
        row = ' style="font-weight: bold"' if is_bold else ""
        sides = {"<": "left", ">": "right"}
        found = "".join(
            f'<{tag} style="text-align: {sides[side]}">{_indented(cell)}</{tag}>'
            for cell, side in zip(cells, self._sides(cells), strict=True)
        )
        return f"<tr{row}>{found}</tr>"

    def _sides(self, cells: Sequence[str]) -> str:
        return self.align or "<" + ">" * (len(cells) - 1)


class Tabular:
    """An object that shows itself as `table()`: in a REPL as text, in a notebook as HTML."""

    def table(self) -> Table:
        """What it shows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


def escape(value: Any) -> str:
    """What the value prints as, as the text of an HTML or SVG element or attribute.

    Control characters become marks: HTML and SVG do not have them.
    """
    return html.escape(printable(str(value)))


def format_bytes(nbytes: int) -> str:
    """Bytes -> 1,234.5 MB of a million bytes each, or from 10 GB on 12.3 GB."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 10**10 else f"{nbytes / 1e6:,.1f} MB"


def _indented(cell: str) -> str:
    """Escaped; HTML would drop the spaces in front."""
    return "&#160;" * (len(cell) - len(cell.lstrip(" "))) + escape(cell.lstrip(" "))
