"""Report tables in a double-line box, or in ASCII if the console cannot print box characters."""

from collections.abc import Sequence
from typing import TextIO

LINES = "╔═╗║╠╣╚╝╟─┼╢│"
ASCII = "+=+|++++|-+||"  # their replacements, in the same order


def can_print(stream: TextIO, text: str = LINES) -> bool:
    """Whether the encoding of a stream can represent these characters."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    footer: Sequence[str] = (),
    widths: Sequence[int] = (),
    ascii_only: bool = False,
) -> str:
    """Title, heads, rows and a footer row -> lines of equal length.

    The first column is left-aligned, the others right-aligned. A column is as wide as its longest
    cell, and at least as wide as `widths` says.
    """
    table = [heads, *rows, *([footer] if footer else [])]
    wide = [max(map(len, column)) for column in zip(*table, strict=True)]
    wide = [max(pair) for pair in zip(wide, widths, strict=True)] if widths else wide
    (
        top_left,
        double,
        top_right,
        side,
        left,
        right,
        bottom_left,
        bottom_right,
        thin_left,
        thin,
        cross,
        thin_right,
        between,
    ) = list(ASCII if ascii_only else LINES)
    inside = sum(wide) + 3 * len(wide) - 1
    wide[0] += max(0, len(title) + 2 - inside)
    inside = max(inside, len(title) + 2)

    def line(cells: Sequence[str], is_head: bool = False) -> str:
        aligned = [
            cell.ljust(width) if column == 0 or is_head else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, wide, strict=True))
        ]
        return f"{side} " + f" {between} ".join(aligned) + f" {side}"

    lines = [
        top_left + double * inside + top_right,
        side + title.center(inside) + side,
        left + double * inside + right,
        line(heads, is_head=True),
        thin_left + cross.join(thin * (width + 2) for width in wide) + thin_right,
        *map(line, rows),
    ]
    if footer:
        lines += [left + double * inside + right, line(footer)]
    return "\n".join([*lines, bottom_left + double * inside + bottom_right]) + "\n"
