"""Everything that is printed: lines, tables and the live line, at most 80 columns wide.

Only what lists or draws runs may be as wide as the terminal.
"""

import errno
import functools
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.console.live_line import LiveLine, can_print, fit, knows_escapes, printable
from smallmind.console.table import OUTLINE, Table
from smallmind.guide import with_page

WIDTH = 80
INDENT = "  "  # of the second and later lines of a long one
MARGIN = "  | "  # of quoted text
SILENT_SECONDS = 60.0  # seconds after which a file gets a line about work that lasts


class Console:
    """Prints to a stream that may be a terminal, a file or a pipe, in any encoding.

    If the stream cannot be written to, such as a file on a full disk, OSError is raised: at once,
    or with `defer_errors` by `check`, so that the work can continue until then.
    """

    def __init__(self, stream: TextIO | None = None, defer_errors: bool = False) -> None:
        # sys.stdout is None if the output was closed before the program started.
        self.stream = stream or sys.stdout or _null_stream()
        if hasattr(self.stream, "reconfigure"):
            # A sample may have characters that this console cannot show.
            self.stream.reconfigure(errors="replace")
        self.is_terminal = self.stream.isatty()
        self.has_reader = True  # until the other end of a pipe is closed
        self.defer_errors = defer_errors
        self.failure: OSError | None = None
        self._live = LiveLine(self.stream)
        self._live.write = self._emit  # type: ignore[method-assign]
        self._rows = 0  # of the lines that `live_lines` shows
        self._pause = activity.Pause()
        self._printed = time.monotonic()  # the time of the last output

    def check(self) -> None:
        """Raises the deferred OSError, if something could not be printed."""
        if self.failure:
            raise self.failure

    def line(self, text: str = "", indent: str = INDENT) -> None:
        """Prints a line that stays; a long one is wrapped at words and continues after indent."""
        self._clear()
        self._write(wrap(text, line_width(), indent) + "\n")

    def warning(self, text: str) -> None:
        """Prints a line with a warning sign in front."""
        sign = "⚠️ " if can_print(self.stream, "⚠️") else "Warning:"
        self.line(f"{sign} {with_page(text)}")

    def command(self, label: str, words: Sequence[str]) -> None:
        """Prints a shell command to copy, quoted; a long one continues after a backslash."""
        parts = [" ".join(map(_quote, words[:2]))]
        for word in map(_quote, words[2:]):
            if parts[-1].startswith("--") and " " not in parts[-1] and not word.startswith("--"):
                parts[-1] += f" {word}"  # a flag and its value stay on one line
            else:
                parts.append(word)
        lines = [label]
        for part in parts:
            if lines != [label] and len(lines[-1]) + len(part) + 3 > line_width():
                lines.append(2 * INDENT + part)
            else:
                lines[-1] += " " + part
        self._clear()
        self._write(" \\\n".join(lines) + "\n")

    def live(self, *variants: str) -> None:
        """Shows a line that the next one replaces: the first variant that fits the terminal.

        Behind an unfinished text, if that does not go on by itself. In a file it is a line of its
        own, and only after a minute without output.
        """
        silent = time.monotonic() - self._printed
        if not self.is_terminal:
            if silent >= SILENT_SECONDS:
                self.line(fit(variants, line_width()))
        elif not self._live.column:
            self._live.show(*variants)
        elif silent >= activity.REFRESH:
            self._live.show(*(f" [{text}]" for text in variants), " ...")

    def live_lines(self, lines: Sequence[str]) -> None:
        """Shows lines that the next ones replace; without escape sequences only the first."""
        if not knows_escapes(self.stream):
            self.live(lines[0])
            return
        self._clear()
        size = shutil.get_terminal_size()
        shown = [printable(fit((line,), size.columns - 1)) for line in lines[: size.lines - 1]]
        self._emit("".join(f"{line}\n" for line in shown))
        self._rows = len(shown)

    def activity(self, text: str | None, usual: bool) -> None:
        """Shows an activity, as the activity hook: on a line of its own if not in a terminal."""
        if not text:
            self._clear()
        elif self.is_terminal or usual or not self._pause.is_over(text):
            self.live(f"{text} ...")
        else:
            self.line(f"{text} ...")

    def from_signal_handler(self, text: str) -> None:
        """Prints a line at once, past the stream: the signal may have interrupted a write to it."""
        shown = self._live.erasing() + wrap(printable(text), line_width()) + "\n"
        with suppress(OSError, ValueError):  # the terminal may be gone
            os.write(self.stream.fileno(), shown.encode(self.stream.encoding, "replace"))
            self._live.forget()

    def piece(self, text: str) -> None:
        """Prints part of a text, neither wrapped nor ended by a line break."""
        self._clear()
        self._write(text)

    def quote(self, text: str) -> None:
        """Prints a text of any length, behind a margin and wrapped."""
        width = line_width() - len(MARGIN)
        for line in text.strip().split("\n"):
            parts = textwrap.wrap(line, max(20, width), break_on_hyphens=False)
            for part in parts or [""]:
                self._clear()
                self._write((MARGIN + part).rstrip() + "\n")
        self.line()

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Prints rows of a name and values below a title, in an outline as wide as a line."""
        self._clear()
        ascii_only = not can_print(self.stream, OUTLINE)
        self._write(Table(title, rows).outline(line_width(), ascii_only))

    def drawing(self, text: str) -> None:
        """Prints lines that are already laid out."""
        self._clear()
        self._write(text.rstrip() + "\n")

    @contextmanager
    def own_screen(self) -> Iterator[None]:
        """Shows an empty screen without a cursor within the block; for terminals with escapes."""
        self._emit("\x1b[?1049h\x1b[?25l\x1b[H\x1b[J")
        try:
            yield
        finally:
            self._emit("\x1b[?25h\x1b[?1049l")

    def draw_screen(self, lines: Sequence[str]) -> None:
        """Shows lines in place of those on the screen; what does not fit is cut."""
        size = shutil.get_terminal_size()
        shown = [printable(line)[: size.columns] for line in lines[: size.lines - 1]]
        self._emit("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")

    def _clear(self) -> None:
        self._live.clear()
        if self._rows:
            self._emit(f"\x1b[{self._rows}F\x1b[J")
            self._rows = 0

    def _write(self, text: str) -> None:
        """Prints text from anywhere without its control characters: a pipe may show it too."""
        text = printable(text)
        if self.is_terminal:
            self._live.follow(text)
        self._emit(text)
        self._printed = time.monotonic()

    def _emit(self, text: str) -> None:
        if not self.has_reader:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            # As in `smallmind train | head`: the work continues without output. Python flushes
            # again when it exits: into the null device.
            self.has_reader = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            # Windows has no name for the error of a pipe whose other end is closed.
            is_closed_pipe = os.name == "nt" and error.errno == errno.EINVAL
            if not (isinstance(error, BrokenPipeError) or is_closed_pipe):
                self.failure = error
                if not self.defer_errors:
                    raise


def typed_lines(notes: Console) -> Iterator[str]:
    """Yields lines of standard input that are not empty; Ctrl-C discards one."""
    if sys.stdin is None:
        raise InputError("standard input is closed: type lines in a terminal, or pipe them in")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # what is not UTF-8
    with suppress(ImportError):  # gives `input` a history; Windows has one of its own
        import readline  # noqa: F401
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            notes.line()
            continue
        except OSError as error:  # a directory, or a stream that is only written to
            reason = error.strerror or "it is not open for reading"
            raise InputError(f"cannot read standard input: {reason}") from None
        if line:
            yield line


def error_line(text: str) -> None:
    """Prints an error to standard error: one line, which is only wrapped on a terminal."""
    stream = sys.stderr or _null_stream()
    text = printable(text)
    if stream.isatty():
        text = "\n".join(
            wrap(line, shutil.get_terminal_size().columns) for line in text.split("\n")
        )
    with suppress(OSError):  # the terminal may be gone
        print(f"{text}\n", end="", file=stream)  # at once: others may print to the same stream


def line_width() -> int:
    """Returns the width of lines: that of the terminal, at most 80."""
    return min(WIDTH, full_width())


def full_width() -> int:
    """Returns the width of tables and drawings that gain from a wide terminal; 80 without one."""
    return max(20, shutil.get_terminal_size().columns)


def wrap(text: str, width: int, indent: str = INDENT) -> str:
    """Breaks a line that is longer than width at spaces; words are never broken."""
    lines = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    fits = (line if len(line) <= width else lines.fill(line) for line in text.split("\n"))
    return "\n".join(fits)


def shorten(name: str, width: int = 40) -> str:
    """Returns a name, with dots in its middle if it is longer than width."""
    half, name = (width - 3) // 2, name.replace("\n", " ")
    return name if len(name) <= width else f"{name[:half]}...{name[-half:]}"


def _quote(word: str) -> str:
    """-> a word quoted for a shell, if possible with double quotes, which also work on Windows."""
    return f'"{word}"' if re.fullmatch(r"[\w]+( [\w]+)+", word) else shlex.quote(word)


@functools.cache
def _null_stream() -> TextIO:
    # Stays open until the process ends.
    return open(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False)
