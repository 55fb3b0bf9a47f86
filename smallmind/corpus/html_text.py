"""The text of HTML: without scripts, styles and comments, laid out in lines and paragraphs."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry, Piece, document
from smallmind.corpus.layout import LEFT_OUT_ELEMENTS, LINE, PARAGRAPH, SPACE, TextLayout, growing
from smallmind.corpus.reading import Limits, Unusable, shown

CHARSET = re.compile(rb"""<meta\b[^>]*\bcharset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
WHITE_SPACE = re.compile(r"[ \t\n\r\f]+")
# Elements that begin and end a paragraph, and those that begin and end a line.
PARAGRAPHS = re.compile(
    "address|article|aside|blockquote|dl|fieldset|figure|footer|form|h[1-6r]|header|main|nav|ol|p|"
    "pre|section|table|title|ul"
)
LINES = re.compile("br|caption|dd|div|dt|figcaption|legend|li|option|td|th|tr")
PREFORMATTED = ("pre", "textarea")  # elements whose white space matters


def read_html(entry: Entry) -> Iterator[Piece]:
    """Returns the text of a page: one document."""
    return document(_chunks(entry), entry.reading.limits.piece)


def _chunks(entry: Entry) -> Iterator[str]:
    layout = TextLayout()
    page = _Page(layout)
    for text in growing(entry, decoded(entry, CHARSET), page.held):
        try:
            page.feed(text)
        except AssertionError as error:  # of the standard library, for odd declarations
            raise Unusable(entry.name, f"is damaged: {shown(error)}", "correct it") from None
        yield layout.take()
    # A tag or comment that never ends is not text; browsers leave it out, too.
    if page.rawdata == "<" or not page.rawdata.startswith("<"):
        page.close()
        yield layout.take()


class _Page(HTMLParser):
    """Writes the text of a page to a layout."""

    def __init__(self, layout: TextLayout) -> None:
        super().__init__(convert_charrefs=True)
        self._layout = layout
        self._left_out = self._preformatted = 0  # how many elements of these kinds are open

    def held(self, limits: Limits) -> tuple[int, int]:
        is_tag = self.cdata_elem is None and self.rawdata[1:2].isalpha()
        return len(self.rawdata), limits.tag if is_tag else limits.record

    def handle_starttag(self, tag: str, _attrs: Any) -> None:
        self._separate(tag)
        self._left_out += tag in LEFT_OUT_ELEMENTS
        self._preformatted += tag in PREFORMATTED

    def handle_endtag(self, tag: str) -> None:
        self._separate(tag)
        self._left_out = max(0, self._left_out - (tag in LEFT_OUT_ELEMENTS))
        self._preformatted = max(0, self._preformatted - (tag in PREFORMATTED))

    def handle_data(self, data: str) -> None:
        if self._left_out:
            return
        if self._preformatted:
            self._layout.write(data)
            return
        words = WHITE_SPACE.sub(" ", data)
        if words.startswith(" "):
            self._layout.separate(SPACE)
        if text := words.strip(" "):
            self._layout.write(text)
        if words.endswith(" "):
            self._layout.separate(SPACE)

    def _separate(self, tag: str) -> None:
        if PARAGRAPHS.fullmatch(tag):
            self._layout.separate(PARAGRAPH)
        elif LINES.fullmatch(tag):
            self._layout.separate(LINE)
