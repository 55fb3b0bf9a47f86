"""The text of HTML: without scripts, styles and comments, laid out in lines and paragraphs."""

import codecs
import email
import email.policy
import io
import re
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from typing import Any

from smallmind.corpus.compressed import Held
from smallmind.corpus.decoding import decoded
from smallmind.corpus.entry import Entry
from smallmind.corpus.layout import LEFT_OUT_ELEMENTS, LINE, PARAGRAPH, TextLayout, growing
from smallmind.corpus.reading import Limits, Unusable, shown
from smallmind.corpus.xml_text import ENCODING

CHARSET = re.compile(rb"""<meta\b[^>]*\bcharset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
# Elements that begin and end a paragraph, and those that begin and end a line.
PARAGRAPHS = re.compile(
    "address|article|aside|blockquote|dl|fieldset|figure|footer|form|h[1-6r]|header|main|nav|ol|p|"
    "pre|section|table|title|ul"
)
LINES = re.compile("br|caption|dd|div|dt|figcaption|legend|li|option|td|th|tr")
LEFT_OUT_OF_BOOKS = (*LEFT_OUT_ELEMENTS, "head", "nav", "rt", "rp")  # and readings of characters
PREFORMATTED = ("pre", "textarea")  # elements whose white space matters


def read_web_archive(entry: Entry) -> Iterator[str]:
    """Returns the text of the page in a web archive, or of a mail: its first part with text.

    Format: RFC 2557 (MHTML). It is held in memory.
    """
    with closing(entry.open()) as stream:
        data = Held(entry, stream).getvalue()
    try:
        message = email.message_from_bytes(data, policy=email.policy.default)
        part = message.get_body(("html", "plain")) or message
        payload, charset = part.get_payload(decode=True), part.get_content_charset()
        content = payload if isinstance(payload, bytes) else b""
        if charset:  # else the page may declare it
            content = codecs.BOM_UTF8 + content.decode(charset, "replace").encode()
    except Exception as error:  # which the library raises for damaged messages is not documented
        raise Unusable(entry.name, f"is damaged: {shown(error)}", "save the page again") from None
    entry.reading.note("read the page of web archives, or the text of mails,")
    inner = entry.unpacked(lambda: Held(entry, io.BytesIO(content)))
    return (texts_of_page if part.get_content_subtype() == "html" else decoded)(inner)


def texts_of_page(entry: Entry, of_book: bool = False) -> Iterator[str]:
    """Yields the text of a page; of a book's without its title and navigation."""
    layout = TextLayout()
    page = _Page(layout, LEFT_OUT_OF_BOOKS if of_book else LEFT_OUT_ELEMENTS)
    for text in growing(entry, decoded(entry, ENCODING if of_book else CHARSET), page.held):
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

    def __init__(self, layout: TextLayout, left_out: tuple[str, ...]) -> None:
        super().__init__(convert_charrefs=True)
        self._layout, self._left_out_elements = layout, left_out
        self._left_out = self._preformatted = 0  # how many elements of these kinds are open

    def held(self, limits: Limits) -> tuple[int, int]:
        is_tag = self.cdata_elem is None and self.rawdata[1:2].isalpha()
        return len(self.rawdata), limits.tag if is_tag else limits.record

    def handle_starttag(self, tag: str, _attrs: Any) -> None:
        self._separate(tag)
        self._left_out += tag in self._left_out_elements
        self._preformatted += tag in PREFORMATTED

    def handle_endtag(self, tag: str) -> None:
        self._separate(tag)
        self._left_out = max(0, self._left_out - (tag in self._left_out_elements))
        self._preformatted = max(0, self._preformatted - (tag in PREFORMATTED))

    def handle_data(self, data: str) -> None:
        if not self._left_out:
            write = self._layout.write if self._preformatted else self._layout.write_words
            write(data)

    def _separate(self, tag: str) -> None:
        if PARAGRAPHS.fullmatch(tag):
            self._layout.separate(PARAGRAPH)
        elif LINES.fullmatch(tag):
            self._layout.separate(LINE)
