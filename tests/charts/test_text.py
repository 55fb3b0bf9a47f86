"""Curves in characters: where they run, and that nothing is too wide or too strange."""

import math

import pytest

from smallmind.charts.text import (
    ASCII_BLOCKS,
    BLOCKS,
    Series,
    format_tick,
    plot,
    sparkline,
    ticks,
)

FALL = Series(range(101), [10 - n / 10 for n in range(101)])


def grid(text):
    """The characters right of the axis, from the top; not the axis below."""
    rows = [line.partition("┤")[2] or line.partition("│")[2] for line in text.splitlines()]
    return [row for row in rows if row]


def test_a_line_runs_from_corner_to_corner():
    rows = grid(plot([FALL], 50, 10))
    assert len(rows) == 10
    starts = [len(row) - len(row.lstrip()) for row in rows]
    assert starts[0] == 0 and starts == sorted(starts)
    width = max(map(len, rows))
    assert len(rows[-1]) == width >= 45 and rows[-1][-1] != " "


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_plot_is_as_wide_as_it_may_be(width, ascii_only):
    text = plot([FALL, Series([50], [5.0], "A")], width, 8, ascii_only)
    assert max(map(len, text.splitlines())) == width and len(text.splitlines()) == 10
    assert "A" in text and "10" in text and "0" in text
    assert text.isascii() == ascii_only


def test_ascii_shows_upper_and_lower_halves():
    text = plot([Series([0, 1], [0.0, 1.0])], 12, 1, ascii_only=True)
    top = text.splitlines()[0].partition("|")[2]
    assert top.startswith(".") and top.endswith("'")


def test_marks_cover_lines_and_later_ones_earlier_ones():
    text = plot([Series([1], [1.0], "B"), Series([1], [1.0], "C"), Series([0, 2], [0, 2])], 30, 5)
    assert "C" in text and "B" not in text


@pytest.mark.parametrize(
    "series",
    [
        [],
        [Series([], [])],
        [Series([5], [2.5])],
        [Series([1, 2], [3.0, 3.0])],
        [Series([0, 1], [0.0, 0.0])],
        [Series([1, 2], [1e-300, 1e300])],
        [Series([1, 2], [-1e-12, 1e-12])],
        [Series([1, 2], [1.0, 1.0 + 1e-15])],
        [Series([2**60, 2**60 + 1], [1.0, 2.0])],
    ],
)
def test_any_finite_points_can_be_drawn(series):
    lines = plot(series, 40, 6).splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= 40
    labels = [line.partition("┤")[0].strip() for line in lines[:6] if "┤" in line]
    assert len(labels) == len(set(labels))


def test_panels_with_the_same_range_stand_below_each_other():
    texts = [plot([Series([0, 10], [y, 2 * y])], 60, 4, False, (0, 20), True, 9) for y in (1, 1e5)]
    bottoms = [text.splitlines()[-2:] for text in texts]
    assert bottoms[0] == bottoms[1]


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 1000, 5, [0, 200, 400, 600, 800, 1000]),
        (0.93, 4.1, 5, [1, 2, 3, 4]),
        (0, 1e-3, 2, [0, 5e-4, 1e-3]),
        (5, 5, 4, [5]),
    ],
)
def test_ticks_are_round(low, high, count, expected):
    assert ticks(low, high, count) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.5, "0.5"),
        (1500.0, "1,500"),
        (2e-5, "2e-05"),
        (2e6, "2,000,000"),
        (-3.0, "-3"),
    ],
)
def test_ticks_are_brief(value, shown):
    assert format_tick(value) == shown


def test_a_sparkline_falls_as_the_values_do():
    values = [8 - n / 100 for n in range(800)]
    assert sparkline(values, 8) == BLOCKS[::-1]
    assert sparkline(values, 8, ascii_only=True) == ASCII_BLOCKS[::-1]
    assert len(sparkline(values, 30)) == 30
    assert sparkline(values[:5], 30) == "█▇▅▂▁"  # no wider than there are values


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, math.nan]])
def test_a_sparkline_of_nothing_is_empty(values):
    assert sparkline(values, 10) == ""


def test_a_sparkline_of_one_value_is_flat():
    assert sparkline([2.5], 10) == BLOCKS[0]
    assert sparkline([2.5] * 40, 10) == BLOCKS[0] * 10
    assert sparkline([1.0, math.nan, 2.0], 10) == BLOCKS[0] + BLOCKS[-1]
