"""Tables as text and as HTML: aligned, and with nothing in them taken for markup."""

import io
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.console.live_line import can_print
from smallmind.console.table import BOX, Table, Tabular, format_bytes

CELLS = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=40)
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


def test_columns_are_below_underlined_heads_and_a_row_is_a_line():
    table = Table("", [("a\nb", "1"), ("c", "12345")], ("name", "count"))
    lines = ["name  count", "----  -----", "a b       1", "c     12345"]
    assert table.columns().split("\n") == lines


def test_an_outline_wraps_its_widest_column_but_no_flag_from_its_value():
    table = Table("Title", [("a setting", "use " * 8 + "--steps 12 --lr 3")])
    lines = table.outline(40, ascii_only=True).splitlines()
    assert lines[0] == "Title" and max(map(len, lines)) <= 40 < len(str(table))
    assert any("--steps 12" in line for line in lines)
    assert table.outline(40).splitlines()[1].startswith("╭")


def test_wide_characters_take_two_columns():
    table = Table("", [("日本語", "1"), ("abc", "22")])
    assert str(table) == "  日本語   1\n  abc     22"


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


@given(st.data(), st.integers(1, 6), st.integers(0, 5), st.booleans(), st.booleans())
def test_all_lines_have_the_same_length(data, columns, count, has_footer, ascii_only):
    row = st.lists(CELLS, min_size=columns, max_size=columns)
    title, heads = data.draw(CELLS), data.draw(row)
    rows = data.draw(st.lists(row, min_size=count, max_size=count))
    footer = data.draw(row) if has_footer else ()
    drawn = Table(title, rows, heads, footer=footer).box(ascii_only=ascii_only)
    lines = drawn.split("\n")
    assert lines.pop() == ""
    assert {len(line) for line in lines} == {len(lines[0])}
    assert all(cell in drawn for line in [heads, *rows, footer] for cell in line)


def test_a_box_looks_as_documented():
    table = Table("REPORT", [["a", "1.5"]], ["Name", "ms"], footer=["ALL", "1.5"])
    assert table.box(widths=[6, 5]) == (
        "╔════════════════╗\n"
        "║     REPORT     ║\n"
        "╠════════════════╣\n"
        "║ Name   │ ms    ║\n"
        "╟────────┼───────╢\n"
        "║ a      │   1.5 ║\n"
        "╠════════════════╣\n"
        "║ ALL    │   1.5 ║\n"
        "╚════════════════╝\n"
    )


def test_a_box_can_be_drawn_in_ascii():
    drawn = Table("REPORT", [["a"]], ["Name"]).box(ascii_only=True)
    assert drawn.isascii()
    assert drawn.splitlines()[0] == "+========+"


@pytest.mark.parametrize(
    ("encoding", "can"), [("utf-8", True), ("cp437", True), ("latin-1", False), (None, False)]
)
def test_can_print_depends_on_the_encoding(encoding, can):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding) if encoding else object()
    assert can_print(stream, BOX) is can
