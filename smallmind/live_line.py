"""A line that the next one replaces, on terminals of any width and in notebooks."""

import os
import shutil
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


class LiveLine:
    """Shows one line on a stream; `is_live` says whether the stream can show such a line."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        is_terminal = stream is not None and stream.isatty()
        # The output of a notebook is no terminal, but a carriage return works there too.
        self.is_live = is_terminal or type(stream).__module__.startswith("ipykernel")
        dumb = os.name == "nt" or os.environ.get("TERM") in (None, "", "dumb")
        self._has_escapes = is_terminal and not dumb
        self._width = 0  # of what is shown

    @property
    def is_shown(self) -> bool:
        """Whether there is something to clear."""
        return self._width > 0

    def show(self, *variants: str) -> None:
        """Shows the first variant that fits, or as many words of the last one as do."""
        columns = shutil.get_terminal_size().columns
        text = fit(variants, max(1, columns - 1))
        self.write(self.erasing(columns) + text)
        self._width = len(text)

    def clear(self) -> None:
        """Clears the line, if there is one."""
        if self._width:
            self.write(self.erasing())
            self._width = 0

    def erasing(self, columns: int | None = None) -> str:
        """What clears the line and returns to its start."""
        columns = columns or shutil.get_terminal_size().columns
        if not self.is_live:
            return ""
        if not self._has_escapes:
            return "\r" + " " * min(self._width, columns - 1) + "\r" if self._width else "\r"
        rows = -(-self._width // columns)
        if rows > 1 and any(name in os.environ for name in REWRAPPING):
            return f"\x1b[{rows - 1}A\r\x1b[J"
        return "\r\x1b[K"

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


def fit(variants: tuple[str, ...], width: int) -> str:
    """The first variant that is not wider, or as many words of the last one as fit."""
    for text in variants:
        if len(text) <= width:
            return text
    text = variants[-1]
    end = text.rfind(" ", 0, width + 1)
    return text[: end if end > 0 else width].rstrip()
