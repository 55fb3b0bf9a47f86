"""The text of XML: of all elements but scripts and styles, without comments."""

import re
from collections.abc import Iterator
from html.entities import html5
from typing import Any
from xml.parsers import expat

from smallmind.checks import InputError
from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry
from smallmind.corpus.layout import LEFT_OUT_ELEMENTS, LINE, TextLayout, growing, separator_in
from smallmind.corpus.reading import Limits, Unusable, shown

ENCODING = re.compile(rb"""\A\s*<\?xml\b[^>]*\bencoding\s*=\s*["']([\w.:-]+)""")
PREDEFINED = ("amp", "apos", "gt", "lt", "quot")
# An entity that stands for others, or for a long text, makes gigabytes of a small file.
MAX_ENTITY = 100  # characters
MAX_SPACE = 2**16  # characters of white space that are kept in a row


def texts_of(entry: Entry, elements: "Elements | None" = None) -> Iterator[str]:
    """Yields what the elements of an XML file write. InputError if it is not well-formed."""
    elements = elements or Elements(entry.name)
    for text in growing(entry, decoded(entry, ENCODING), elements.held):
        elements.feed(text)
        yield elements.layout.take()
    elements.end()


class Elements:
    """Writes the text of elements to a layout.

    White space within a text stays as it is. At the edges of elements it only indents them, and
    separates what it stands between; so does the end of an element right before the next.
    """

    def __init__(self, name: str) -> None:
        self.layout = TextLayout()
        self._name = name
        self._fed = 0  # bytes
        self._left_out = 0  # how many elements of this kind are open
        self._held = ""  # white space that a tag or more text may follow
        self._is_after_tag, self._is_after_end = True, False
        # decoded() has seen to the encoding; what the file declares no longer holds.
        self.parser = expat.ParserCreate("utf-8")
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.EntityDeclHandler = self._declare
        self.parser.SkippedEntityHandler = self._entity

    def held(self, limits: Limits) -> tuple[int, int]:
        return self._fed - max(0, self.parser.CurrentByteIndex), limits.record

    def feed(self, text: str, is_last: bool = False) -> None:
        """Parses the next part of the file. InputError if it is not well-formed."""
        data = text.encode("utf-8", "replace")
        self._fed += len(data)
        try:
            self.parser.Parse(data, is_last)
        except expat.ExpatError as error:
            reason = f"is not well-formed XML: {shown(error)}"
            advice = "correct it, or rename it to .html, which may have errors"
            raise Unusable(self._name, reason, advice) from None

    def end(self) -> None:
        """Ends the file. InputError if it should not end here."""
        if self._fed:
            self.feed("", is_last=True)

    def _start(self, tag: str, _attributes: dict[str, str]) -> None:
        if self._is_after_end and not self._held:
            self.layout.separate(LINE)
        self._edge(is_end=False)
        self._left_out += _is_left_out(tag)

    def _end(self, tag: str) -> None:
        self._edge(is_end=True)
        self._left_out -= _is_left_out(tag)

    def _edge(self, is_end: bool) -> None:
        self.layout.separate(separator_in(self._held))
        self._held = ""
        self._is_after_tag, self._is_after_end = True, is_end

    def _text(self, data: str) -> None:
        if self._left_out:
            return
        data = self._held + data
        text = data.rstrip()
        self._held = data[len(text) :][:MAX_SPACE]
        if not text:
            return
        if self._is_after_tag:
            words = text.lstrip()
            self.layout.separate(separator_in(text[: len(text) - len(words)]))
            text = words
        self.layout.write(text)
        self._is_after_tag = self._is_after_end = False

    def _declare(self, name: str, _is_parameter: bool, value: str | None, *_where: Any) -> None:
        if value and name not in PREDEFINED and ("&" in value or len(value) > MAX_ENTITY):
            raise InputError(
                f"{self._name} defines the entity {shown(name, 60)!r}, which stands for other "
                "entities or a long text; replace it by its text"
            )

    def _entity(self, name: str, is_parameter: bool) -> None:
        """Writes an entity that an external definition declares, as in XHTML."""
        if not is_parameter:
            self._text(html5.get(f"{name};", ""))


def _is_left_out(tag: str) -> bool:
    return tag.rpartition(":")[2].lower() in LEFT_OUT_ELEMENTS
