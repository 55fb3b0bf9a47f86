"""Books, office documents, PDF, web archives, subtitles: their text, as people read it."""

import sys
import types
import zipfile

import pytest

from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding
from smallmind.corpus.reading import Limits
from smallmind.runs.source import TextSource, reread_source
from smallmind.settings.config import RunConfig
from tests.corpus.reading import corpus, documents, lines, refused, skipped, written
from tests.programs import refusal


def zipped(path, parts):
    """Writes an archive of these parts, as the formats ask: the first one is stored."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, (name, data) in enumerate(parts.items()):
            archive.writestr(name, data, None if number else zipfile.ZIP_STORED)
    return path


CONTAINER = (
    '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:'
    'container"><rootfiles><rootfile full-path="OEBPS/content.opf" '
    'media-type="application/oebps-package+xml"/></rootfiles></container>'
)
PACKAGE = """<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata/><manifest>
<item id="a" href="text/first%20page.xhtml" media-type="application/xhtml+xml"/>
<item id="b" href="text/b.xhtml" media-type="application/xhtml+xml"/>
<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="scripted nav"/>
<item id="toc" href="toc.xhtml" media-type="application/xhtml+xml"/>
<item id="cover" href="cover.svg" media-type="image/svg+xml"/>
<item id="unused" href="unused.xhtml" media-type="application/xhtml+xml"/></manifest>
<spine><itemref idref="cover"/><itemref idref="nav"/><itemref idref="toc"/><itemref idref="b"/>
<itemref idref="a"/><itemref idref="gone"/><itemref idref="b"/></spine>
<guide><reference type="toc" href="toc.xhtml#start" title="Contents"/></guide></package>"""


def page(body):
    return (
        '<?xml version="1.0" encoding="UTF-8"?><html xmlns="http://www.w3.org/1999/xhtml"><head>'
        f"<title>The Book</title><style/><script/></head><body>{body}</body></html>"
    )


BOOK = {
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": CONTAINER,
    "OEBPS/content.opf": PACKAGE,
    "OEBPS/text/first page.xhtml": page("<h1>Two</h1><p>A &amp; b&#160;é.</p>"),
    "OEBPS/text/b.xhtml": page("<h1>One</h1><nav>x</nav><p><ruby>漢<rt>kan</rt></ruby>字</p>"),
    "OEBPS/nav.xhtml": page("<nav><ol><li>One</li></ol></nav>"),
    "OEBPS/toc.xhtml": page("<p>Contents</p>"),
    "OEBPS/unused.xhtml": page("<p>unused</p>"),
    "OEBPS/cover.svg": "<svg/>",
}
BOOK_TEXT = "One\n\n漢字\n\nTwo\n\nA & b\xa0é."


def word(body, notes="", name="document"):
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    parts = {"[Content_Types].xml": "<Types/>"}
    parts[f"word/{name}.xml"] = f"<w:document {space}><w:body>{body}</w:body></w:document>"
    if notes:
        parts["word/footnotes.xml"] = f"<w:footnotes {space}>{notes}</w:footnotes>"
    return parts


def run(text, properties=""):
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(*runs, properties=""):
    return f"<w:p><w:pPr>{properties}</w:pPr>{''.join(runs)}</w:p>"


def row(*cells):
    return f"<w:tr>{''.join(f'<w:tc>{cell}</w:tc>' for cell in cells)}</w:tr>"


TABS = '<w:tabs><w:tab w:val="left" w:pos="720"/></w:tabs>'
DELETED = '<w:del w:id="1"><w:r><w:delText>gone</w:delText></w:r></w:del>'
INSERTED = f'<w:ins w:id="2">{run("new")}</w:ins>'
MARK_DELETED = '<w:rPr><w:del w:id="3"/></w:rPr>'
FIELD = "<w:r><w:instrText> PAGEREF _x </w:instrText></w:r>"
REFERENCE = '<w:r><w:footnoteReference w:id="{}"/></w:r>'
FOOTNOTES = (
    '<w:footnote w:type="separator" w:id="-1"><w:p><w:r><w:separator/></w:r></w:p></w:footnote>'
    f'<w:footnote w:id="2">{paragraph(run(" First note."))}</w:footnote>'
    f'<w:footnote w:id="3">{paragraph(run("Second "), run("note."))}</w:footnote>'
)
BOX = (
    "<w:r><mc:AlternateContent xmlns:mc='m'><mc:Choice>{0}</mc:Choice><mc:Fallback>{0}"
    "</mc:Fallback></mc:AlternateContent></w:r>"
)
WORD = {
    "runs": (
        word(paragraph(run("Two  "), run("words", "<w:b/>"), run(" &amp; é 漢"))),
        "Two  words & é 漢",
    ),
    "paragraphs": (
        word("\n".join(paragraph(run(x)) for x in ("Head", "", "a", "b"))),
        "Head\n\na\n\nb",
    ),
    "breaks": (
        word(paragraph(run("a"), "<w:r><w:br/></w:r>", run("b"), "<w:r><w:tab/></w:r>", run("c"))),
        "a\nb\tc",
    ),
    "tab stops": (word(paragraph(run("a"), properties=TABS)), "a"),
    "deletions": (word(paragraph(run("old"), DELETED, INSERTED, FIELD)), "oldnew"),
    "deleted end": (
        word(
            paragraph(run("one "), properties=MARK_DELETED)
            + paragraph(run("two"))
            + paragraph(run("3"))
        ),
        "one two\n\n3",
    ),
    "moved": (
        word(
            paragraph("<w:moveFrom>", run("a"), "</w:moveFrom><w:moveTo>", run("b"), "</w:moveTo>")
        ),
        "b",
    ),
    "table": (
        word(
            paragraph(run("before"))
            + f"<w:tbl>{row(paragraph(run('a')), paragraph(run('b')) + paragraph(run('c')))}"
            + f"{row(paragraph(run('d')), paragraph(run('e')))}</w:tbl>"
            + paragraph(run("after"))
        ),
        "before\n\na\tb c\nd\te\n\nafter",
    ),
    "notes": (
        word(paragraph(run("x"), REFERENCE.format(3), run(" y"), REFERENCE.format(2)), FOOTNOTES),
        "x[1] y[2]\n\n[2]  First note.\n\n[1] Second note.",
    ),
    "box": (word(paragraph(run("a"), BOX.format(paragraph(run("boxed"))))), "a\n\nboxed"),
    "other name": (word(paragraph(run("a")), name="document2"), "a"),
}


def odt(body):
    names = ("office", "text", "table", "draw", "svg")
    spaces = " ".join(f'xmlns:{name}="urn:{name}"' for name in names)
    content = f"<office:document-content {spaces}><office:body><office:text>{body}"
    content += "</office:text></office:body></office:document-content>"
    return {"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": content}


NOTE = (
    '<text:note text:note-class="footnote"><text:note-citation>i</text:note-citation>'
    "<text:note-body><text:p>A <text:span>note</text:span>.</text:p></text:note-body></text:note>"
)
TRACKED = (
    "<text:tracked-changes><text:changed-region><text:deletion><text:p>gone</text:p></text:deletion>"
    "</text:changed-region></text:tracked-changes>"
)
ODT = {
    "spaces": (
        '<text:h>Head</text:h><text:p>a \n b<text:s text:c="3"/>c<text:tab/>d<text:s/></text:p>',
        "Head\n\na b   c\td ",
    ),
    "lines": ("<text:p>a<text:line-break/>b</text:p>\n<text:p/>\n<text:p>c</text:p>", "a\nb\n\nc"),
    "deletions": (f"{TRACKED}<text:p>a<text:change/> b</text:p>", "a b"),
    "comments": (
        "<text:p>a<office:annotation><text:p>no</text:p></office:annotation>b</text:p>",
        "ab",
    ),
    "notes": (
        f"<text:p>a{NOTE} b{NOTE}</text:p><text:p>c</text:p>",
        "a[1] b[2]\n\nc\n\n[1] A note.\n\n[2] A note.",
    ),
    "table": (
        "<table:table><table:table-row><table:table-cell><text:p>a</text:p><text:p>b</text:p>"
        "</table:table-cell><table:table-cell><text:p>c</text:p></table:table-cell>"
        "</table:table-row><table:table-row><table:table-cell><text:p>d</text:p>"
        "</table:table-cell></table:table-row></table:table><text:p>e</text:p>",
        "a b\tc\nd\n\ne",
    ),
    "contents": (
        "<text:table-of-content><text:p>Head 1</text:p></text:table-of-content><text:p>a</text:p>",
        "a",
    ),
    "picture": (
        "<text:p>a<draw:frame><draw:image/><svg:desc>a cat</svg:desc></draw:frame></text:p>",
        "a",
    ),
}
CASES = [
    ("a.epub", BOOK, BOOK_TEXT),
    *((f"{name}.docx", *case) for name, case in WORD.items()),
    *((f"{name}.odt", odt(body), text) for name, (body, text) in ODT.items()),
]


@pytest.mark.parametrize("piece", [3, None])
@pytest.mark.parametrize(("name", "parts", "text"), CASES, ids=[name for name, *_ in CASES])
def test_the_text_of_a_document(name, parts, text, piece, tmp_path):
    texts = corpus(zipped(tmp_path / name, parts), piece, encoding="koi8-r")
    assert documents(texts) == [text]
    suffix = name.rpartition(".")[2]
    assert (
        f"read the text of .{suffix}, without layout and pictures, in 1 file" in texts.report.notes
    )


def test_pages_of_old_books_have_another_type(tmp_path):
    old = PACKAGE.replace(
        'b.xhtml" media-type="application/xhtml+xml"',
        'b.xhtml#top" media-type="text/x-oeb1-document"',
    )
    book = {**BOOK, "OEBPS/content.opf": old}
    assert documents(zipped(tmp_path / "a.epub", book)) == [BOOK_TEXT]


def test_documents_in_an_archive_are_read_one_by_one(tmp_path):
    parts = {}
    for name in ("a.epub", "runs.docx", "lines.odt"):
        case = next(case for case in CASES if case[0] == name)
        parts[name] = zipped(tmp_path / name, case[1]).read_bytes()
        (tmp_path / name).unlink()
    texts = Corpus(zipped(tmp_path / "a.zip", parts))
    assert documents(texts) == [BOOK_TEXT, "Two  words & é 漢", "a\nb\n\nc"]


MANIFEST = "<m:manifest xmlns:m='m'><m:file-entry><m:encryption-data/></m:file-entry></m:manifest>"
RIGHTS = "<encryption><CipherReference URI='OEBPS/text/b.xhtml'/></encryption>"
FONT = "<encryption><CipherReference URI='OEBPS/font.otf'/></encryption>"
DEEP = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))
ENTITIES = f'<!DOCTYPE a [<!ENTITY a0 "ha">{DEEP}]><w:p><w:t>&a9;</w:t></w:p>'


@pytest.mark.parametrize(
    ("name", "parts", "words"),
    [
        ("a.epub", {**BOOK, "META-INF/encryption.xml": RIGHTS}, "is protected (DRM); use a copy"),
        ("b.epub", {"mimetype": "application/epub+zip"}, "has no list of its pages; it is damaged"),
        ("c.epub", {**BOOK, "../x": "a"}, "has a member '../x', outside the folder"),
        ("a.odt", {**odt(""), "META-INF/manifest.xml": MANIFEST}, "is encrypted; save it without"),
        ("b.odt", odt(""), "has no text in it"),
        ("a.docx", {"a": "", "word/document.xml": ENTITIES}, "defines the entity 'a1'"),
        ("b.docx", {"a": "", "word/document.xml": "<w:p><w:t>a"}, "is not well-formed XML"),
        ("c.docx", {"a": ""}, "has no text in it"),
        ("d.docx", word(paragraph(run("a" * 80_000_000))), "expands more than 200-fold"),
        ("d.epub", {**BOOK, "OEBPS/text/b.xhtml": page("a" * 80_000_000)}, "more than 200-fold"),
    ],
)
def test_what_cannot_be_read_is_refused(name, parts, words, tmp_path):
    assert words in refused(zipped(tmp_path / name, parts))


def test_a_bomb_in_a_document_in_an_archive_is_refused(tmp_path):
    bomb = zipped(tmp_path / "a.docx", word(paragraph(run("a" * 30_000_000)))).read_bytes()
    path = zipped(tmp_path / "a.zip", {f"{n}.docx": bomb for n in range(9)})
    assert "expands more than 200-fold" in refused(path)


def test_fonts_of_a_book_may_be_obfuscated(tmp_path):
    path = zipped(tmp_path / "a.epub", {**BOOK, "META-INF/encryption.xml": FONT})
    assert documents(path) == [BOOK_TEXT]


@pytest.mark.parametrize("suffix", ["docx", "odt", "epub"])
def test_what_is_no_document_is_skipped_in_a_folder(suffix, tmp_path):
    written(tmp_path / f"~$a.{suffix}", b"\x05Anna\0" * 9)  # a lock file of Word
    written(tmp_path / f"old.{suffix}", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99))
    written(tmp_path / "z.txt", "text")
    texts = Corpus(tmp_path)
    assert documents(texts) == ["text"]
    assert skipped(texts, tmp_path) == {
        f"~$a.{suffix}": f"is not a .{suffix} file",
        f"old.{suffix}": "is encrypted, or of an older format",
    }


def test_a_document_that_does_not_fit_into_memory_is_refused_in_an_archive(tmp_path):
    inner = zipped(tmp_path / "a.docx", WORD["runs"][0]).read_bytes()
    path = zipped(tmp_path / "a.zip", {"a.docx": inner})
    assert "has more than 100 bytes; convert it" in refused(path, limits=Limits(whole=100))


ARCHIVE = (
    "From: <Saved by Blink>\r\nSnapshot-Content-Location: http://localhost/\r\n"
    "Subject: =?utf-8?Q?S=C3=BC=C3=9F?=\r\nMIME-Version: 1.0\r\n"
    'Content-Type: multipart/related;\r\n\ttype="text/html";\r\n\tboundary="--b--"\r\n\r\n\r\n'
    "----b--\r\nContent-Type: text/html\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n"
    '<!DOCTYPE html><html><head><meta charset=3D"UTF-8"></head><body><p>S=C3=BC=C3=9F &amp;=\r\n'
    " more</p></body></html>\r\n----b--\r\nContent-Type: image/png\r\n"
    "Content-Transfer-Encoding: base64\r\n\r\niVBORw0KGgo=\r\n----b----\r\n"
)
MAIL = (
    "Subject: a\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=x\n\n--x\n"
    "Content-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: 8bit\n\n"
    "S\xfc\xdf <b>\n"
    "--x\nContent-Type: application/pdf\n\nJVBERi0=\n--x--\n"
)


@pytest.mark.parametrize("name", ["a.mhtml", "a.mht", "a.txt", "a.html", "a"])
def test_a_web_archive_is_read_as_its_page(name, tmp_path):
    texts = Corpus(written(tmp_path / name, ARCHIVE))
    assert documents(texts) == ["Süß & more"]
    assert "read the page of web archives, or the text of mails, in 1 file" in texts.report.notes
    assert documents(written(tmp_path / name, MAIL.encode("latin-1"))) == ["Süß <b>"]


SRT = (
    "\ufeff1\r\n00:00:01,000 --> 00:00:04,000\r\n<i>Where are</i> you?\r\n- Here.\r\n\r\n"
    '2\r\n00:00:05,500 --> 00:00:07,000 X1:40 X2:600\r\n{\\an8}<font color="#fff">42</font>\r\n\r\n'
    "3\r\n00:00:08,000 --> 00:00:09,000\r\n\r\n4\r\n00:00:10,000 --> 00:00:11,000\r\n4 < 5\r\n"
    "5\r\n00:00:12,000 --> 00:00:13,000\r\nNo blank line above."
)
VTT = (
    "WEBVTT - A title\nKind: captions\n\nSTYLE\n::cue { color: red }\n\nNOTE\nA comment.\n\n"
    "intro\n00:01.000 --> 00:04.000 line:63% align:start\n<v Ann>Hi &amp; <c.loud>bye</c></v>\n\n"
    "01:00:05.000 --> 01:00:07.000\nNo.\n\n01:00:08.000 --> 01:00:09.000\nNo.\n"
)
SCROLLING = (
    "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\n \nhello<00:00:00.500><c> there</c>\n\n"
    "00:00:02.000 --> 00:00:02.010\nhello there\n \n\n"
    "00:00:02.010 --> 00:00:04.000\nhello there\nagain<00:00:03.000><c> you</c>\n"
)
CONVERTED = "".join(  # by yt-dlp, from captions that scroll
    f"{i}\n00:00:{times}\n{text}\n\n"
    for i, (times, text) in enumerate(
        [
            ("00,160 --> 00:00:02,350", "hello there"),
            ("02,350 --> 00:00:02,360", "hello there\n "),
            ("02,360 --> 00:00:04,000", "hello there\nagain you"),
            ("04,000 --> 00:00:04,010", "again you\n "),
            ("04,010 --> 00:00:06,000", "again you\nand more"),
        ],
        1,
    )
)


@pytest.mark.parametrize("piece", [1, 7, None])
@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.srt", SRT, "Where are you?\n- Here.\n42\n4 < 5\nNo blank line above.\n"),
        ("a.vtt", VTT, "Hi & bye\nNo.\nNo.\n"),
        ("b.vtt", SCROLLING, "hello there\nagain you\n"),
        ("b.srt", CONVERTED, "hello there\nagain you\nand more\n"),
    ],
)
def test_subtitles_are_read_without_times(name, data, text, piece, tmp_path):
    texts = corpus(written(tmp_path / name, data), piece)
    assert documents(texts) == [text]
    assert "read subtitles without their times in 1 file" in texts.report.notes


YAML = '---\ntitle: "A: b"\ntags:\n  - x\n- y\n# comment\n\ndraft: true\n---\n'


@pytest.mark.parametrize("piece", [1, 5, None])
@pytest.mark.parametrize(
    ("front", "rest"),
    [
        (YAML, "\n# Head\n\n---\nname: text\n---\n"),
        (YAML.replace("\n", "\r\n"), "text"),
        ("---\na: 1\n...\n", "text"),
        ("---\n---\n", "text"),
        ('+++\ntitle = "a"\n[extra]\n+++\n', "text"),
        ("", "---\n\nText after a rule.\n\n---\nmore\n"),
        ("", "---\ntitle: never closed\ntext\n"),
        ("", "# Head\n---\na: 1\n---\n"),
        ("", "-"),
    ],
)
def test_front_matter_is_left_out(front, rest, piece, tmp_path):
    for name in ("a.md", "a.markdown"):
        texts = corpus(written(tmp_path / name, front + rest), piece)
        assert documents(texts) == [rest.lstrip() if front else rest]
        assert ("left out the front matter of Markdown in 1 file" in texts.report.notes) == bool(
            front
        )
    assert documents(written(tmp_path / "a.txt", front + rest))[0].endswith(rest)


def test_a_pdf_names_what_reads_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    path = written(tmp_path / "a.pdf", b"%PDF-1.4\n\xe2\xe3\n")
    assert refused(path).endswith(
        'is a PDF document; to read it: pip install "smallmind[pdf]", or convert it to text with '
        "pdftotext"
    )
    written(tmp_path / "b.txt", "text")
    texts = Corpus(tmp_path)
    assert documents(texts) == ["text"]
    assert skipped(texts, tmp_path) == {"a.pdf": "is a PDF document"}


class Reader:
    """Stands in for pypdf's: the file says what the pages have."""

    def __init__(self, file):
        lines = file.read(999).decode().splitlines()[1:]
        if "damaged" in lines:
            raise OSError("EOF marker\nnot found")
        self.is_encrypted = bool({"locked", "owner"} & {*lines})
        self.opens = "locked" not in lines
        self.pages = [types.SimpleNamespace(extract_text=lambda line=line: line) for line in lines]

    def decrypt(self, password):
        return int(self.opens)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("locked", "is encrypted; save it without a password"),
        ("damaged", "is damaged: EOF marker\ufffdnot found; save it again"),
        (" \n \n", "has no text in it, as if scanned; make text with ocrmypdf"),
    ],
)
def test_a_pdf_without_text_is_refused(lines, words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", types.SimpleNamespace(PdfReader=Reader))
    assert refused(written(tmp_path / "a.pdf", f"%PDF-1.4\n{lines}")).endswith(words)
    written(tmp_path / "a.pdf", "%PDF-1.4\none\n \nowner\n")
    for path in (tmp_path / "a.pdf", zipped(tmp_path / "a.zip", {"a.pdf": "%PDF-1\none\nowner"})):
        assert documents(path) == ["one\nowner"]


@pytest.mark.interop
def test_what_word_and_office_libraries_write(tmp_path):
    docx, odf, table = (pytest.importorskip(x) for x in ("docx", "odf.opendocument", "odf.table"))
    text = pytest.importorskip("odf.text")
    made = docx.Document()
    made.add_heading("Head", 1)
    made.add_paragraph("one ").add_run("bold").bold = True
    grid = made.add_table(2, 2)
    for number in range(4):
        grid.cell(number // 2, number % 2).text = f"c{number}"
    made.add_paragraph("item", style="List Bullet")
    made.save(tmp_path / "a.docx")
    assert documents(tmp_path / "a.docx") == ["Head\n\none bold\n\nc0\tc1\nc2\tc3\n\nitem"]

    made = odf.OpenDocumentText()
    made.text.addElement(text.H(outlinelevel=1, text="Head"))
    part = text.P(text="one")
    part.addElement(text.S(c=2))
    part.addText("two")
    note, body = text.Note(noteclass="footnote"), text.NoteBody()
    body.addElement(text.P(text="The note."))
    note.addElement(text.NoteCitation(text="1"))
    note.addElement(body)
    part.addElement(note)
    made.text.addElement(part)
    grid, line = table.Table(), table.TableRow()
    for name in "ab":
        cell = table.TableCell()
        cell.addElement(text.P(text=name))
        line.addElement(cell)
    grid.addElement(line)
    made.text.addElement(grid)
    made.save(str(tmp_path / "a.odt"))
    assert documents(tmp_path / "a.odt") == ["Head\n\none  two[1]\n\na\tb\n\n[1] The note."]


@pytest.mark.interop
def test_what_a_library_for_books_writes(tmp_path):
    epub = pytest.importorskip("ebooklib.epub")
    book = epub.EpubBook()
    book.set_title("The Book")
    pages = [epub.EpubHtml(title=f"C{n}", file_name=f"c{n}.xhtml") for n in (2, 1)]
    for number, each in enumerate(pages):
        each.content = f"<h1>Chapter {number}</h1><p>Text &amp; more.</p>"
        book.add_item(each)
    book.toc = pages
    book.add_item(epub.EpubNcx())
    book.add_item(epub.EpubNav())
    book.spine = ["nav", *pages]
    epub.write_epub(str(tmp_path / "a.epub"), book)
    expected = "Chapter 0\n\nText & more.\n\nChapter 1\n\nText & more."
    assert documents(tmp_path / "a.epub") == [expected]


@pytest.mark.interop
def test_what_a_library_for_pdf_writes(tmp_path):
    pytest.importorskip("pypdf")
    canvas, crypt = (
        pytest.importorskip(f"reportlab.{x}") for x in ("pdfgen.canvas", "lib.pdfencrypt")
    )

    def drawn(name, lines, **settings):
        made = canvas.Canvas(str(tmp_path / name), **settings)
        for line in lines:
            made.drawString(100, 700, line)
            made.showPage()
        made.rect(1, 1, 9, 9)
        made.save()
        return tmp_path / name

    assert documents(drawn("a.pdf", ["Page one", "Page two"])) == ["Page one\nPage two"]
    owned = drawn("b.pdf", ["free"], encrypt=crypt.StandardEncryption("", "owner"))
    assert documents(owned) == ["free"]
    locked = drawn("c.pdf", ["x"], encrypt=crypt.StandardEncryption("user", "owner"))
    assert "is encrypted; save it without a password" in refused(locked)
    assert "has no text in it, as if scanned" in refused(drawn("d.pdf", []))
    cut = written(tmp_path / "e.pdf", (tmp_path / "a.pdf").read_bytes()[:200])
    assert "is damaged: " in refused(cut)


@pytest.mark.interop
def test_zstd_is_unpacked_like_other_compressed_files(tmp_path, monkeypatch):
    if sys.version_info < (3, 14):
        pytest.importorskip("backports.zstd")
    from smallmind.corpus.compressed import _zstd

    pack = _zstd().compress
    data = pack(b'{"text": "a b"}\n') + pack(b'{"text": "c"}\n')  # frames may follow one another
    texts = Corpus(written(tmp_path / "a.jsonl.zst", data))
    assert documents(texts) == ["a b", "c"]
    pair = pack(b'{"question": "a", "answer": "b"}\n' * 2)
    assert Corpus(written(tmp_path / "c.jsonl.zst", pair)).has_conversations()
    text = "Ein süßer Bär.\n" * 9999
    path = written(tmp_path / "a.txt.zst", pack(text.encode()))
    assert documents(corpus(path, 1000)) == [text]
    whole = path.read_bytes()
    for damaged in (whole[:-5], b"text", whole[:4]):
        assert "is damaged or incomplete: " in refused(written(tmp_path / "b.txt.zst", damaged))
    bomb = written(tmp_path / "d.txt.zst", pack(b"a" * 80_000_000))
    assert "expands more than 200-fold" in refused(bomb)
    assert "is a .tar archive" in refused(written(tmp_path / "e.tar.zst", pack(b"a")))


def test_zstd_names_the_extra_that_unpacks_it(tmp_path, monkeypatch):
    monkeypatch.setattr("smallmind.corpus.compressed._zstd", lambda: None)
    path = written(tmp_path / "a.jsonl.zst", b"\x28\xb5\x2f\xfd")
    advice = 'is compressed with zstd; to read it: pip install "smallmind[zst]"'
    assert refused(path).endswith(advice)
    written(tmp_path / "b.txt", "text")
    assert documents(Corpus(tmp_path)) == ["text"]


def test_runs_of_versions_that_read_fewer_formats_find_their_texts(tmp_path):
    """They read what is above Markdown and the times of subtitles, and skipped documents."""
    written(tmp_path / "texts" / "a.md", "---\ntitle: a\n---\nabout a")
    written(tmp_path / "texts" / "b.srt", "1\n00:00:01,000 --> 00:00:02,000\nhi\n")
    written(tmp_path / "texts" / "c.jsonl", lines({"data": ["q", "a"], "text": "said"}))
    zipped(tmp_path / "texts" / "d.docx", word(paragraph(run("d"))))
    chat = written(tmp_path / "chat.txt", "31.12.20, 23:59 - Ann: hi\n31.12.20, 23:59 - Me: ho\n")
    earlier = [path.read_text() for path in sorted((tmp_path / "texts").glob("[ab].*"))]
    for path, texts in (tmp_path / "texts", [*earlier, "said"]), (chat, [chat.read_text()]):
        sha256 = TextSource("\n".join(texts), "a").sha256
        encoding = Encoding("char", chosen_separator="\n")
        settings = tmp_path, RunConfig(text=str(path)), encoding
        found = reread_source(*settings, sha256, tmp_path / "cache")
        assert found.sha256 == sha256
        message = refusal(reread_source, *settings, "0" * 64, tmp_path / "cache")
        assert "has changed since" in message or "if the text of the run has moved" in message
