"""EPUB, DOCX and ODT, which are zip archives of XML: paragraphs, rows of tables, notes at the end.

Formats: https://www.w3.org/TR/epub-33/, ECMA-376 part 1, OASIS OpenDocument 1.3 part 3.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from urllib.parse import unquote

from smallmind.corpus.compressed import opened_zip
from smallmind.corpus.entry import Entry
from smallmind.corpus.html_text import texts_of_page
from smallmind.corpus.layout import LINE, PARAGRAPH, SPACE, TAB, TextLayout
from smallmind.corpus.reading import Unusable
from smallmind.corpus.xml_text import Elements, texts_of

# Left out of office documents with all that is in them: deletions, comments, properties, contents.
LEFT_OUT = {
    *("w:del", "w:moveFrom", "w:instrText", "w:pPr", "w:rPr", "w:rt", "mc:Fallback"),
    *("text:tracked-changes", "text:table-of-content", "text:note-citation", "text:ruby-text"),
    *("office:annotation", "svg:title", "svg:desc"),
}
TEXTS = ("text:p", "text:h", "w:t", "m:t")  # elements whose characters are text
SEPARATE = {
    **dict.fromkeys(("w:p", "text:p", "text:h", "w:tbl", "table:table"), PARAGRAPH),
    **dict.fromkeys(("w:tr", "table:table-row", "w:br", "w:cr", "text:line-break"), LINE),
    **dict.fromkeys(("w:tc", "table:table-cell"), TAB),
}
IN_CELLS = ("w:p", "text:p", "text:h", "w:br", "w:cr", "text:line-break")  # become spaces there
CHARACTERS = {"w:tab": "\t", "text:tab": "\t", "text:s": " ", "w:noBreakHyphen": "\u2011"}
PAGE = re.compile("html|x-oeb1-document")  # the type of a page; the latter in old books
WORD_PARTS = [re.compile(rf"word/{name}\d*\.xml") for name in ("document", "footnotes", "endnotes")]


def epub(entry: Entry) -> Iterator[str]:
    """Yields a book, its pages in the order of reading. Unusable if it is protected."""
    with _parts(entry) as parts:
        pages = (texts_of_page(page, of_book=True) for page in _pages(entry, parts))
        yield from _joined(pages)


def _pages(entry: Entry, parts: dict[str, Entry]) -> Iterator[Entry]:
    """Yields the pages of a book without its navigation."""
    roots = [tag.get("full-path", "") for tag in _tags(parts, "META-INF/container.xml", "rootfile")]
    if not roots or roots[0] not in parts:
        raise Unusable(
            entry.name, "has no list of its pages", "it is damaged; download or copy it again"
        )
    toc = [tag for tag in _tags(parts, roots[0], "reference") if tag.get("type") == "toc"]
    left_out = {tag.get("href", "").partition("#")[0] for tag in toc}
    items = {tag.get("id"): tag for tag in _tags(parts, roots[0], "item")}
    locked = [tag.get("URI") for tag in _tags(parts, "META-INF/encryption.xml", "CipherReference")]
    for itemref in _tags(parts, roots[0], "itemref"):
        item = items.get(itemref.get("idref"), {})
        href = item.get("href", "").partition("#")[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(roots[0]), unquote(href)))
        if path in locked:
            raise Unusable(entry.name, "is protected (DRM)", "use a copy without DRM")
        is_navigation = "nav" in item.get("properties", "").split() or href in left_out
        if not is_navigation and PAGE.search(item.get("media-type", "")) and path in parts:
            yield parts.pop(path)  # once, however often a hostile book names it


def docx(entry: Entry) -> Iterator[str]:
    """Yields the text of a Word document, as it is once its tracked changes are accepted."""
    with _parts(entry) as parts:
        marks: dict[str, int] = {}
        names = [name for part in WORD_PARTS for name in parts if part.fullmatch(name)]
        texts = (texts_of(parts[name], _Body(parts[name].name, marks)) for name in names)
        yield from _joined(texts)


def odt(entry: Entry) -> Iterator[str]:
    """Yields the text of an OpenDocument text, as it is once its tracked changes are accepted."""
    with _parts(entry) as parts:
        if _tags(parts, "META-INF/manifest.xml", "encryption-data"):
            raise Unusable(entry.name, "is encrypted", "save it without a password")
        if part := parts.get("content.xml"):
            body = _Body(part.name, {})
            texts = (texts_of(part, body), (body.notes.take() for _ in "1"))
            yield from _joined(texts)


@contextmanager
def _parts(entry: Entry) -> Iterator[dict[str, Entry]]:
    """Opens a document -> its parts by name. Unusable if it is no zip archive."""
    with entry.reading.paused(), closing(entry.open()) as stream:
        head = stream.read(4)
    if head != b"PK\3\4":  # an encrypted .docx is a file of OLE, as those of Word 2003 are
        is_old = head == b"\xd0\xcf\x11\xe0"
        reason = (
            "is encrypted, or of an older format" if is_old else f"is not a {entry.suffix} file"
        )
        raise Unusable(entry.name, reason, "save it again, without a password, or as plain text")
    entry.reading.note(f"read the text of {entry.suffix}, without layout and pictures,")
    with opened_zip(entry) as members:
        yield {each.filename: replace(opened(), declares=True) for each, opened, _ in members}


def _tags(parts: dict[str, Entry], path: str, wanted: str) -> list[dict[str, str]]:
    """Returns the attributes of all elements of a name in a part, if there is one."""
    found: list[dict[str, str]] = []
    tags = Elements(path)
    tags.parser.StartElementHandler = lambda tag, attributes: (
        found.append(attributes) if tag.rpartition(":")[2] == wanted else None
    )
    if path in parts:
        for _ in texts_of(parts[path], tags):
            pass
    return found


def _joined(texts: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yields the chunks of texts, with a blank line between those that are not empty."""
    gap = next_gap = ""
    for chunks in texts:
        for chunk in filter(None, chunks):
            yield gap + chunk
            gap, next_gap = "", "\n\n"
        gap = next_gap


class _Body(Elements):
    """Writes the paragraphs of an office document.

    `marks` numbers the notes of a Word document, which are in other parts.
    """

    def __init__(self, name: str, marks: dict[str, int]) -> None:
        super().__init__(name)
        self.notes, self._to = TextLayout(), self.layout
        self._marks, self._mark = marks, ""  # and the one before the next text
        self._texts = self._tables = self._notes = 0  # open elements of these kinds, and notes
        self._joins = self._is_word = False

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        # Where the end of a paragraph is deleted, the next one continues it.
        self._joins |= bool(self._left_out) and tag in ("w:del", "w:moveFrom")
        if self._left_out or tag in LEFT_OUT:
            self._left_out += 1
            return
        self._texts += tag in TEXTS
        self._tables += tag in ("w:tbl", "table:table")
        self._is_word = tag in ("w:t", "m:t")
        note = tag.removesuffix("Reference") + attributes.get("w:id", "")
        if tag == "w:p" and self._joins:
            self._joins = False
        elif tag in CHARACTERS:
            count = attributes.get("text:c", "")[:3]
            self._write(CHARACTERS[tag] * (int(count) if count.isdecimal() else 1))
        elif tag in ("w:footnoteReference", "w:endnoteReference"):
            self._write(f"[{self._marks.setdefault(note, len(self._marks) + 1)}]")
        elif note in self._marks:
            self._mark = f"[{self._marks[note]}] "
        elif tag == "text:note-body":
            self._notes += 1
            self._write(f"[{self._notes}]")
            self._to, self._mark = self.notes, f"[{self._notes}] "
        else:
            self._separate(tag)

    def _end(self, tag: str) -> None:
        if self._left_out:
            self._left_out -= 1
            return
        self._texts -= tag in TEXTS
        if tag != "w:p":
            self._separate(tag)
        self._tables -= tag in ("w:tbl", "table:table")
        self._to = self.layout if tag == "text:note-body" else self._to

    def _separate(self, tag: str) -> None:
        if tag in SEPARATE:
            self._to.separate(SPACE if self._tables and tag in IN_CELLS else SEPARATE[tag])

    def _text(self, data: str) -> None:
        if not self._texts or self._left_out or (self._mark and data.isspace()):
            return
        if self._mark:
            self._write("")
        # In Word each space counts, else only with an element of its own.
        write = self._to.write if self._is_word else self._to.write_words
        write(data)

    def _write(self, text: str) -> None:
        self._to.write(self._mark + text)
        self._mark = ""
