"""Everything that is printed: tables, the live line, and what a plain terminal gets instead."""

import functools
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from smallmind.box import can_print

MARGIN = "  | "


class Console:
    """Prints to a stream that may be a terminal, a file or a pipe, in any encoding.

    Where it takes no more, as a file on a full disk, there is an OSError: at once, or where patient
    from `check`, so that the work can go on.
    """

    def __init__(self, stream: TextIO | None = None, patient: bool = False) -> None:
        # A program whose output was closed before it began has none.
        self.stream = stream or sys.stdout or _nowhere()
        if hasattr(self.stream, "reconfigure"):
            # A sample may hold characters that this console does not have.
            self.stream.reconfigure(errors="replace")
        self.is_terminal = self.stream.isatty()
        self.is_read = True  # until nobody reads it: the other end of a pipe has gone
        self.patient = patient
        self.failure: OSError | None = None
        self._live_width = 0

    def check(self) -> None:
        """OSError where something could not be printed."""
        if self.failure:
            raise self.failure

    def line(self, text: str = "") -> None:
        """One line that stays."""
        self._clear()
        self._write(text + "\n")

    def warning(self, text: str) -> None:
        """One line that stays, with a sign in front."""
        sign = "⚠️ " if can_print(self.stream, "⚠️") else "Warning:"
        self.line(f"{sign} {text}")

    def live(self, text: str) -> None:
        """A line that the next one replaces; only on a terminal."""
        width = max(1, shutil.get_terminal_size().columns - 1)
        text = text[:width]
        self._write("\r" + text.ljust(min(self._live_width, width)))
        self._live_width = len(text)

    def piece(self, text: str) -> None:
        """Part of a line, shown at once; a terminal gets no control characters."""
        self._clear()
        self._write(_printable(text) if self.is_terminal else text)

    def quote(self, text: str) -> None:
        """Text of any length, set off by a margin and wrapped to the terminal."""
        width = min(100, shutil.get_terminal_size().columns) - len(MARGIN)
        for line in text.strip().split("\n"):
            for part in textwrap.wrap(_printable(line), max(20, width)) or [""]:
                self.line((MARGIN + part).rstrip())
        self.line()

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Rows of a name and values, the last column right-aligned, in a box under a title."""
        # tabulate takes time to import, which --help does not need.
        from tabulate import tabulate

        style = "rounded_outline" if can_print(self.stream, "╭─┬╮│") else "outline"
        align = ["left"] * (len(rows[0]) - 1) + ["right"]
        self.line(title)
        self.line(tabulate(rows, tablefmt=style, colalign=align, disable_numparse=True))

    def _clear(self) -> None:
        if self._live_width:
            self._write("\r" + " " * self._live_width + "\r")
            self._live_width = 0

    def _write(self, text: str) -> None:
        if not self.is_read:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            # As in `smallmind train | head`: the work goes on, unseen. Python flushes once more at
            # its end, into nothing.
            self.is_read = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if not isinstance(error, BrokenPipeError):
                self.failure = error
                if not self.patient:
                    raise


@functools.cache
def _nowhere() -> TextIO:
    # Open until the end of the process.
    return open(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False)


def _printable(text: str) -> str:
    """text with a mark in place of control characters, which could rewrite the screen."""
    return "".join(
        "\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t\r" else c for c in text
    )


def duration(seconds: float) -> str:
    """Seconds -> 0:07, 12:34 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def megabytes(nbytes: int) -> str:
    """Bytes -> 1,234.5 MB, of a million bytes each."""
    return f"{nbytes / 1e6:,.1f} MB"
