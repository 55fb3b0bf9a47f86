"""Tables: one value, as text with or without lines, or as HTML for pages and notebooks."""

import html
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from smallmind.console.live_line import column_after, printable

BOX, ASCII_BOX = "╔═╗║╠╣╚╝╟─┼╢│", "+=+|++++|-+||"  # lines, and what replaces them in ASCII
OUTLINE = "╭─┬╮│"
GAP = "  "  # between columns


@dataclass(frozen=True)
class Table:
    """A title above rows of cells, all of them text, and a row of totals below.

    `align` has a character for each column: < for left, > for right; by default only the first
    column is left-aligned. The row with the number `best` is bold in HTML.
    """

    title: str
    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    align: str = ""
    best: int | None = None
    footer: Sequence[str] = ()

    def __str__(self) -> str:
        lines = [f"  {line}" for line in self._lines([self.heads] if self.heads else [])]
        return printable("\n".join([self.title, *lines] if self.title else lines))

    def columns(self) -> str:
        """Returns the rows below underlined heads, without a title."""
        wide = _widths([self.heads, *self._body()])
        return "\n".join(self._lines([self.heads, ["-" * width for width in wide]]))

    def outline(self, width: int, ascii_only: bool = False) -> str:
        """Returns the title above the rows in an outline; only the last column is right-aligned."""
        from tabulate import tabulate  # takes time to import, which --help does not need

        style = "outline" if ascii_only else "rounded_outline"
        align = ["left"] * (len(self.rows[0]) - 1) + ["right"]
        rows = _wrapped(self.rows, width)
        table = tabulate(rows, tablefmt=style, colalign=align, disable_numparse=True)
        return f"{self.title}\n{table}\n"

    def box(self, widths: Sequence[int] = (), ascii_only: bool = False) -> str:
        """Returns the table in a box of double lines; `widths` are the smallest of its columns."""
        cells = _widths([self.heads, *self._body()])
        wide = [max(pair) for pair in zip_longest(cells, widths, fillvalue=0)]
        inside = max(sum(wide) + 3 * len(wide) - 1, len(self.title) + 2)
        wide[0] += inside - (sum(wide) + 3 * len(wide) - 1)
        double, thin = "═" * inside, "┼".join("─" * (width + 2) for width in wide)
        heads, *rows = (
            f"║ {' │ '.join(_padded(row, wide, sides))} ║"
            for row, sides in [
                (self.heads, "<" * len(wide)),
                *((row, self._sides(row)) for row in self._body()),
            ]
        )
        if self.footer:
            rows.insert(-1, f"╠{double}╣")
        title = f"║{self.title.center(inside)}║"
        lines = [f"╔{double}╗", title, f"╠{double}╣", heads, f"╟{thin}╢", *rows, f"╚{double}╝"]
        text = "\n".join(lines) + "\n"
        return text.translate(str.maketrans(BOX, ASCII_BOX)) if ascii_only else text

    def parts(self, draw: Callable[["Table"], str], width: int) -> Iterator[str]:
        """Yields drawings of parts with the first column and as many others as fit a width."""
        columns = list(zip(self.heads, *self.rows, strict=True))
        begin = 1
        while begin < len(columns):
            for end in range(len(columns), begin, -1):
                heads, *rows = zip(columns[0], *columns[begin:end], strict=True)
                drawn = draw(replace(self, heads=heads, rows=rows))
                if max(map(len, drawn.split("\n"))) <= width:
                    break
            yield drawn
            begin = end

    def html(self) -> str:
        """Returns a <table> in the colours of its page. What the cells hold is text, not markup.

        Each cell names its column, for a page that is too narrow for columns.
        """
        parts = [f"<caption>{escape(self.title)}</caption>"] if self.title else []
        if self.heads:
            parts.append(f"<thead>{self._row(self.heads, 'th')}</thead>")
        rows = (
            self._row(row, "td", number == self.best) for number, row in enumerate(self._body())
        )
        return f"<table>{''.join(parts)}<tbody>{''.join(rows)}</tbody></table>"

    def _row(self, cells: Sequence[str], tag: str, is_bold: bool = False) -> str:
        row = ' style="font-weight: bold"' if is_bold else ""
        sides = {"<": "left", ">": "right"}
        heads = [f' data-head="{escape(head)}"' for head in self.heads if tag == "td"]
        found = "".join(
            f'<{tag}{head} style="text-align: {sides[side]}">{_indented(cell)}</{tag}>'
            for cell, side, head in zip_longest(cells, self._sides(cells), heads, fillvalue="")
        )
        return f"<tr{row}>{found}</tr>"

    def _body(self) -> list[Sequence[str]]:
        """Returns the rows and the totals."""
        return [*self.rows, self.footer] if self.footer else list(self.rows)

    def _lines(self, above: Sequence[Sequence[str]]) -> list[str]:
        """Returns the rows and those above them as lines, aligned."""
        rows = [*above, *self._body()]
        wide = _widths(rows)
        return [GAP.join(_padded(row, wide, self._sides(row))).rstrip() for row in rows]

    def _sides(self, cells: Sequence[str]) -> str:
        return self.align or "<" + ">" * (len(cells) - 1)


class Tabular:
    """An object that shows itself as `table()`: in a REPL as text, in a notebook as HTML."""

    def table(self) -> Table:
        """Returns what it shows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


def escape(value: Any) -> str:
    """Escapes a value for HTML or SVG, which do not have control characters."""
    return html.escape(printable(str(value)))


def format_bytes(nbytes: int) -> str:
    """Bytes -> 1,234.5 MB of a million bytes each, or from 10 GB on 12.3 GB."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 10**10 else f"{nbytes / 1e6:,.1f} MB"


def _indented(cell: str) -> str:
    """Escapes a cell, and its spaces in front, which HTML would drop."""
    return "&#160;" * (len(cell) - len(cell.lstrip(" "))) + escape(cell.lstrip(" "))


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_width, column)) for column in zip(*rows, strict=True)]


def _width(cell: str) -> int:
    """Returns the columns that a line takes, in which some characters take two."""
    return column_after(cell.replace("\n", " "), 0, sys.maxsize)


def _padded(cells: Sequence[str], widths: Sequence[int], sides: str) -> list[str]:
    padded = []
    for cell, width, side in zip(cells, widths, sides, strict=True):
        line, blanks = cell.replace("\n", " "), " " * (width - _width(cell))
        padded.append(line + blanks if side == "<" else blanks + line)
    return padded


def _wrapped(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """-> the rows, their widest columns wrapped until together they are no wider than `width`."""
    cells = [list(row) for row in rows]
    for _ in cells[0]:
        widths = _widths([line for row in cells for line in _lines(row)])
        widest = widths.index(max(widths))
        most = max(8, width - 1 - sum(w + 3 for w in widths) + widths[widest])
        for row in cells:
            row[widest] = _wrapped_cell(row[widest], most)
    return cells


def _lines(row: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the lines of a row whose cells may have several."""
    return list(zip_longest(*(cell.split("\n") for cell in row), fillvalue=""))


def _wrapped_cell(cell: str, width: int) -> str:
    if len(cell) <= width:
        return cell
    together = re.sub(r"(--\S+) (?!--)", "\\1\0", cell)  # a flag and its value
    lines = textwrap.wrap(together, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")
