"""Tables as text and as HTML: aligned, and with nothing in them taken for markup."""

from xml.etree import ElementTree

from smallmind.console.table import Table, Tabular, format_bytes

TABLE = Table("A title", [("one", "1", "x"), ("  twelve", "12", "")], ("name", "count", ""), "<><")


class Shown(Tabular):
    def table(self):
        return TABLE


def test_as_text_columns_are_aligned_and_lines_have_no_trailing_spaces():
    lines = ["A title", "  name      count", "  one           1  x", "    twelve     12"]
    assert str(TABLE).split("\n") == lines == repr(Shown()).split("\n")


def test_only_the_first_column_is_left_aligned_by_default():
    assert str(Table("", [("a", "1"), ("bb", "22")])) == "  a    1\n  bb  22"
    assert str(Table("Nothing", [])) == "Nothing"


def test_as_html_it_has_a_caption_heads_and_rows():
    table = ElementTree.fromstring(Shown()._repr_html_())
    assert table.findtext("caption") == "A title"
    assert [cell.text for cell in table.findall("thead/tr/th")] == ["name", "count", None]
    rows = table.findall("tbody/tr")
    assert [cell.get("style") for cell in rows[0]] == [f"text-align: {s}" for s in SIDES]
    assert rows[1][0].text == "\N{NO-BREAK SPACE}" * 2 + "twelve"
    assert ElementTree.fromstring(Table("", []).html()).findall("caption") == []


SIDES = ("left", "right", "left")


def test_the_best_row_is_bold():
    table = ElementTree.fromstring(Table("", [("a",), ("b",)], best=1).html())
    assert [row.get("style") for row in table.findall("tbody/tr")] == [None, "font-weight: bold"]


def test_text_is_not_markup():
    evil = "</table><script>alert('&')</script>"
    table = ElementTree.fromstring(Table(evil, [(evil, evil)], (evil, evil)).html())
    assert table.findtext("caption") == evil == table.findtext("tbody/tr/td")
    assert table.findtext("thead/tr/th") == evil and table.find(".//script") is None


def test_bytes_are_written_in_one_of_two_units():
    sizes = {0: "0.0 MB", 12_345_678: "12.3 MB", 10**10: "10.0 GB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in sizes} == sizes
