"""A line that the next one replaces, on terminals of any width and in notebooks."""

import os
import re
import shutil
import unicodedata
from typing import TextIO

# Terminals that wrap a line again when they become narrower, by a variable that each of them sets.
# Others cut it; if the rows above were cleared there, they would be those of other lines.
REWRAPPING = (
    "VTE_VERSION",
    "KITTY_WINDOW_ID",
    "ITERM_SESSION_ID",
    "KONSOLE_VERSION",
    "ALACRITTY_WINDOW_ID",
    "WEZTERM_PANE",
    "WT_SESSION",
    "TMUX",
)
TAB = 8  # columns
# Control characters but for tabs and line breaks, and marks that change the order of characters:
# those could move the cursor, rename the window, or show another text than there is.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class LiveLine:
    """Shows one line on a stream; `is_live` says whether the stream can show such a line.

    It begins at `column`: behind the text on that row, if that has not ended.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        is_terminal = stream is not None and stream.isatty()
        # The output of a notebook is not a terminal, but a carriage return works there too.
        self.is_live = is_terminal or type(stream).__module__.startswith("ipykernel")
        self._has_escapes = stream is not None and knows_escapes(stream)
        self._width = 0  # of what is shown
        self.column = 0

    @property
    def is_shown(self) -> bool:
        """True if there is something to clear."""
        return self._width > 0

    def show(self, *variants: str) -> None:
        """Shows the first variant that fits, or as many words of the last one as do."""
        columns = shutil.get_terminal_size().columns
        text = fit(variants, max(0 if self.column else 1, columns - self.column - 1))
        text = printable(text)
        self.write(self.erasing(columns) + text)
        self._width = len(text)

    def clear(self) -> None:
        """Clears the line, if there is one."""
        if self._width:
            self.write(self.erasing())
            self._width = 0

    def erasing(self, columns: int | None = None) -> str:
        """Returns the characters that clear the line and return to its start."""
        columns = columns or shutil.get_terminal_size().columns
        if not self.is_live:
            return ""
        if self.column:
            back = "\b" * self._width
            return back + " " * self._width + back
        if not self._has_escapes:
            return "\r" + " " * min(self._width, columns - 1) + "\r" if self._width else "\r"
        rows = -(-self._width // columns)
        if rows > 1 and any(name in os.environ for name in REWRAPPING):
            return f"\x1b[{rows - 1}A\r\x1b[J"
        return "\r\x1b[K"

    def follow(self, text: str) -> None:
        """Says what has been printed: the line begins where that ends."""
        self.column = column_after(text, self.column, shutil.get_terminal_size().columns)

    def forget(self) -> None:
        """Says that something else has replaced the line."""
        self._width = 0

    def write(self, text: str) -> None:
        """Writes to the stream, which may be gone."""
        try:
            if self.stream is not None:
                self.stream.write(text)
                self.stream.flush()
        except (OSError, ValueError):
            self.stream = None


def knows_escapes(stream: TextIO) -> bool:
    """Tells if a terminal knows escape sequences. That of Windows does only when asked to."""
    is_dumb = os.name == "nt" or os.environ.get("TERM") in (None, "", "dumb")
    return stream.isatty() and not is_dumb


def can_print(stream: TextIO, text: str) -> bool:
    """Tells if the encoding of a stream can represent these characters."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def printable(text: str) -> str:
    """Returns the text with a mark in place of each UNSAFE character, for a terminal or a page."""
    return UNSAFE.sub("\ufffd", text.replace("\r\n", "\n"))


def fit(variants: tuple[str, ...], width: int) -> str:
    """Returns the first variant that is not wider, or as many words of the last one as fit."""
    for text in variants:
        if len(text) <= width:
            return text
    text = variants[-1]
    end = text.rfind(" ", 0, width + 1)
    return text[: end if end > 0 else width].rstrip()


def column_after(text: str, column: int, columns: int) -> int:
    """-> where the cursor is after a text that begins at a column; `columns`: the row is full."""
    start = text.rfind("\n") + 1
    column = 0 if start else column
    for char in text[start:]:
        if char == "\t":
            column = min(column - column % TAB + TAB, columns - 1)
            continue
        if unicodedata.category(char) in ("Mn", "Me", "Cf"):  # drawn over the one before
            continue
        width = 2 if unicodedata.east_asian_width(char) in "WF" else 1
        column = width if column + width > columns else column + width
    return column
