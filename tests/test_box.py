"""Tables in a box."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.console import box

CELLS = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=40)


@given(st.data(), st.integers(1, 6), st.integers(0, 5), st.booleans(), st.booleans())
def test_all_lines_have_the_same_length(data, columns, count, has_footer, ascii_only):
    row = st.lists(CELLS, min_size=columns, max_size=columns)
    title, heads = data.draw(CELLS), data.draw(row)
    rows = data.draw(st.lists(row, min_size=count, max_size=count))
    footer = data.draw(row) if has_footer else ()
    drawn = box.draw(title, heads, rows, footer, ascii_only=ascii_only)
    lines = drawn.split("\n")
    assert lines.pop() == ""
    assert {len(line) for line in lines} == {len(lines[0])}
    assert all(cell in drawn for line in [heads, *rows, footer] for cell in line)


def test_a_box_looks_as_documented():
    assert box.draw("REPORT", ["Name", "ms"], [["a", "1.5"]], ["ALL", "1.5"], widths=[6, 5]) == (
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
    drawn = box.draw("REPORT", ["Name"], [["a"]], ascii_only=True)
    assert drawn.isascii()
    assert drawn.splitlines()[0] == "+========+"


@pytest.mark.parametrize(
    ("encoding", "can"), [("utf-8", True), ("cp437", True), ("latin-1", False), (None, False)]
)
def test_can_print_depends_on_the_encoding(encoding, can):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding) if encoding else object()
    assert box.can_print(stream) is can
