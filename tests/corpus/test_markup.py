"""HTML and XML: the text alone, in lines and paragraphs, and no harm from hostile files."""

import pytest

from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import Limits
from tests.corpus.reading import corpus, documents, refused, written

PAGE = """<!DOCTYPE html>
<html><head><title>A page</title>
<style>p { color: red }</style><script>if (a < b) { "</p>" }</script></head>
<body><!-- a comment -->
<h1>Bears &amp; bees</h1>
<p>One   <b>bold</b><i>italic</i>
word&nbsp;&#x41;.
<p>Two<br>lines<ul><li>a<li>b</ul>
<pre>
  kept
    as is</pre>
a < b &copy; <
"""
PAGE_TEXT = (
    "A page\n\nBears & bees\n\nOne bolditalic word\xa0A.\n\nTwo\nlines\n\na\nb\n\n"
    "\n  kept\n    as is\n\na < b \u00a9 <"
)
BOOK = """<?xml version="1.0"?>
<!DOCTYPE book [<!ENTITY bear "grizzly">]>
<book>
  <title>Bears</title><author>B&amp;B</author>
  <p>A <i>big</i> &bear;.</p>

  <!-- a comment --><script>no()</script>
  <verse xml:space="preserve">
    Line one
      Line two
  </verse>
  <![CDATA[<raw>]]>
</book>
"""
BOOK_TEXT = "Bears\nB&B\nA big grizzly.\n\nLine one\n      Line two\n<raw>"


@pytest.mark.parametrize("piece", [1, 2, 7, 64, None])
@pytest.mark.parametrize("name", ["a.html", "a.HTM"])
def test_the_text_of_a_page(name, piece, tmp_path):
    assert documents(corpus(written(tmp_path / name, PAGE), piece)) == [PAGE_TEXT]


@pytest.mark.parametrize("piece", [1, 2, 7, 64, None])
def test_the_text_of_xml(piece, tmp_path):
    assert documents(corpus(written(tmp_path / "a.xml", BOOK), piece)) == [BOOK_TEXT]


def test_the_encoding_that_a_file_declares(tmp_path):
    page = '<meta charset="latin-1"><p>süß'.encode("latin-1")
    assert documents(written(tmp_path / "a.html", page)) == ["süß"]
    xml = "<?xml version='1.0' encoding='ISO-8859-2'?><a>źdźbło</a>"
    assert documents(written(tmp_path / "a.xml", xml.encode("iso-8859-2"))) == ["źdźbło"]
    assert documents(written(tmp_path / "b.xml", xml.replace("ISO-8859-2", "UTF-16"))) == ["źdźbło"]
    assert documents(written(tmp_path / "c.xml", xml.replace("8859-2", "8859-x"))) == ["źdźbło"]
    assert documents(written(tmp_path / "d.xml", xml.encode("utf-16"))) == ["źdźbło"]
    assert "is not UTF-8" in refused(written(tmp_path / "e.html", "<p>süß".encode("latin-1")))


@pytest.mark.parametrize(
    "page",
    [
        "text<!-- never ends " + "<!--" * 100_000,
        "text<script>never ends " + "<b>" * 100_000,
        "text<a href='never ends " + "<" * 100_000,
        "text</" + "</" * 100_000,
        "text<?" + "<?" * 100_000,
    ],
)
def test_markup_that_never_ends_is_left_out(page, tmp_path):
    assert documents(written(tmp_path / "a.html", page)) == ["text"]


def test_a_page_may_be_damaged(tmp_path):
    page = "<p>a</b></p></p><div><b>c<<d>&bogus; &#99999999999; <![endif]><table><p>e"
    [text] = documents(written(tmp_path / "a.html", page))
    assert text.startswith("a\n\nc<") and text.endswith("e")
    assert documents(written(tmp_path / "a.html", "<p>a <")) == ["a <"]
    assert "has no text in it" in refused(written(tmp_path / "b.html", "<p></p><!-- a -->"))
    assert "is empty" in refused(written(tmp_path / "c.html", ""))


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        ("<a><b></a>", "is not well-formed XML: mismatched tag: line 1, column 8; correct it"),
        ("<a>text", "is not well-formed XML: no element found: line 1"),
        ("just text", "is not well-formed XML: syntax error"),
        ("<a>&nbsp;</a>", "is not well-formed XML: undefined entity"),
        ("<a/>", "has no text in it"),
        ("", "is empty"),
    ],
)
def test_damaged_xml_is_refused(xml, words, tmp_path):
    assert words in refused(written(tmp_path / "a.xml", xml))


def test_entities_of_an_external_definition_are_those_of_html(tmp_path):
    xml = '<!DOCTYPE html PUBLIC "x" "http://localhost/x.dtd"><p>a&nbsp;b &eacute;&odd;</p>'
    assert documents(written(tmp_path / "a.xml", xml)) == ["a\xa0b é"]


def test_entities_make_no_gigabytes(tmp_path):
    entities = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))
    xml = f'<!DOCTYPE a [<!ENTITY a0 "ha">{entities}]><a b="&a9;">&a9;</a>'
    message = refused(written(tmp_path / "a.xml", xml))
    assert "defines the entity 'a1', which stands for other entities or a long text" in message
    long = f'<!DOCTYPE a [<!ENTITY a0 "{"ha" * 100_000}">]><a>{"&a0;" * 100_000}</a>'
    assert "defines the entity 'a0'" in refused(written(tmp_path / "b.xml", long))


def test_no_other_file_is_read(tmp_path):
    written(tmp_path / "secret", "secret")
    xml = f'<!DOCTYPE a [<!ENTITY s SYSTEM "{tmp_path / "secret"}">]><a>text &s;</a>'
    assert documents(written(tmp_path / "a.xml", xml)) == ["text"]


@pytest.mark.parametrize("name", ["a.xml", "a.html"])
def test_a_large_file(name, tmp_path):
    paragraph = "<p>Some words &amp; more.</p>\n<!-- and a comment -->\n"
    path = written(tmp_path / name, f"<div>{paragraph * 60_000}</div>")
    [text] = documents(path)
    gap = "\n\n" if name == "a.html" else "\n"
    assert text.split(gap if name == "a.html" else None)[0] == (
        "Some words & more." if name == "a.html" else "Some"
    )
    assert text.count("Some words & more.") == 60_000
    assert text.replace("Some words & more.", "").strip("\n") == ""
    assert all(len(piece.text) <= 2**20 for piece in Corpus(path).pieces())


@pytest.mark.parametrize("name", ["a.xml", "a.html"])
def test_a_tag_that_would_not_fit_into_memory_is_refused(name, tmp_path):
    path = written(tmp_path / name, f"<a>text<!-- {'long ' * 1000}--></a>")
    assert documents(path) == ["text"]
    limits = Limits(piece=100, record=1000)
    assert "has a tag or comment of more than 1,000 characters" in refused(path, limits=limits)


def test_a_tag_that_the_parser_needs_much_memory_for_is_refused(tmp_path):
    path = written(tmp_path / "a.html", "text<a" + " b" * 3_000_000)
    assert "has a tag or comment of more than 4,194,304 characters" in refused(path)
    image = f"<img src='data:{'A' * 3_000_000}'>"
    assert documents(written(tmp_path / "b.html", f"<p>a{image}b")) == ["ab"]


def test_elements_may_be_nested_deeply(tmp_path):
    xml = "<a>" * 100_000 + "text" + "</a>" * 100_000
    assert documents(written(tmp_path / "a.xml", xml)) == ["text"]
    assert documents(written(tmp_path / "a.html", xml)) == ["text"]
