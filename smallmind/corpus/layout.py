"""The text of marked-up documents: words, and the spaces and line breaks between them."""

import re
from collections.abc import Callable, Iterable, Iterator

from smallmind.checks import InputError
from smallmind.corpus.entry import Entry
from smallmind.corpus.reading import Limits

NO_SEPARATOR, SPACE, TAB, LINE, PARAGRAPH = range(5)  # what separates words, the weakest first
SEPARATORS = ("", " ", "\t", "\n", "\n\n")
WHITE_SPACE = re.compile(r"[ \t\n\r\f]+")
LEFT_OUT_ELEMENTS = ("script", "style")  # elements


class TextLayout:
    """Collects text. Of several separators between words only the strongest is written."""

    def __init__(self) -> None:
        self._written: list[str] = []
        self._separator = NO_SEPARATOR
        self._has_begun = False

    def write(self, words: str) -> None:
        """Writes words, which do not begin with white space unless it matters."""
        if self._has_begun:
            self._written.append(SEPARATORS[self._separator])
        self._written.append(words)
        self._separator, self._has_begun = NO_SEPARATOR, True

    def write_words(self, text: str) -> None:
        """Writes text whose white space, however long, only separates words."""
        words = WHITE_SPACE.sub(" ", text)
        if words.startswith(" "):
            self.separate(SPACE)
        if stripped := words.strip(" "):
            self.write(stripped)
        if words.endswith(" "):
            self.separate(SPACE)

    def separate(self, separator: int) -> None:
        """Separates the next words from the previous ones, if there are both."""
        self._separator = max(self._separator, separator)

    def take(self) -> str:
        """Returns the text written since the last call."""
        written = "".join(self._written)
        self._written.clear()
        return written


def separator_in(space: str) -> int:
    """White space at the edge of an element -> the separator that it amounts to."""
    breaks = space.count("\n")
    return min(LINE + breaks - 1, PARAGRAPH) if breaks else SPACE if space else NO_SEPARATOR


def growing(
    entry: Entry, chunks: Iterable[str], held: Callable[[Limits], tuple[int, int]]
) -> Iterator[str]:
    """Yields the chunks, joined until they are longer than what the parser will scan again.

    A tag or comment of any length is so scanned a few times, rather than once per chunk. `held`
    returns how long the unfinished element is, and how long it may be: InputError beyond that.
    """
    waiting: list[str] = []
    length = 0
    for chunk in chunks:
        waiting.append(chunk)
        length += len(chunk)
        unfinished, longest = held(entry.reading.limits)
        if length + unfinished > longest and unfinished:
            raise InputError(
                f"{entry.name} has a tag or comment of more than {longest:,} characters; "
                "shorten it, or leave the file out"
            )
        if length >= unfinished:
            yield "".join(waiting)
            waiting, length = [], 0
    yield "".join(waiting)
