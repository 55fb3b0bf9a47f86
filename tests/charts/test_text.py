"""Curves in characters: where they run, and that nothing is too wide or too strange."""

import math

import pytest

from smallmind.charts.curve import Curve
from smallmind.charts.figure import Figure, Line, Panel
from smallmind.charts.text import (
    ASCII_BLOCKS,
    BLOCKS,
    draw,
    format_tick,
    sparkline,
    ticks,
)

FALL = Curve(range(101), range(101), [10 - n / 10 for n in range(101)])


def plot(curve, width, height, ascii_only=False, dots=((), ()), **others):
    """A panel with a line, and dots at some steps with some values."""
    steps, values = dots
    lines = [Line("", curve), Line("", Curve(steps, steps, values), dots=True)]
    panel = Panel("", "", lines)
    return draw(Figure("", [panel]), panel, width, height, ascii_only, **others)


def grid(text):
    """The characters right of the axis, from the top; not the axis below."""
    rows = [line.partition("┤")[2] or line.partition("│")[2] for line in text.splitlines()]
    return [row for row in rows if row]


def test_a_line_runs_from_corner_to_corner():
    rows = grid(plot(FALL, 54, 10))
    assert len(rows) == 10
    starts = [len(row) - len(row.lstrip()) for row in rows]
    assert starts[0] == 0 and starts == sorted(starts)
    width = max(map(len, rows))
    assert len(rows[-1]) == width >= 45 and rows[-1][-1] != " "


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_plot_is_as_wide_as_it_may_be(width, ascii_only):
    text = plot(FALL, width, 8, ascii_only, ([50], [5.0]), marks="A")
    assert max(map(len, text.splitlines())) == width and len(text.splitlines()) == 10
    assert "A" in text and "10" in text and "0" in text
    assert text.isascii() == ascii_only


def test_ascii_shows_upper_and_lower_halves():
    text = plot(Curve([0, 1], [0, 1], [0.0, 1.0]), 12, 1, ascii_only=True)
    top = text.splitlines()[0].partition("|")[2]
    assert top.startswith(".") and top.endswith("'")


def test_marks_cover_lines_and_later_ones_earlier_ones():
    point = Curve([1], [1], [1.0])
    lines = [Line("", FALL), Line("", point, 0, dots=True), Line("", point, 1, dots=True)]
    panel = Panel("", "", lines)
    text = draw(Figure("", [panel]), panel, 30, 5, marks="BC")
    assert "C" in text and "B" not in text


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        ([], []),
        ([5], [2.5]),
        ([0], [2.5]),
        ([1, 2], [3.0, 3.0]),
        ([0, 1], [0.0, 0.0]),
        ([1, 2], [1e-300, 1e300]),
        ([1, 2], [-1e-12, 1e-12]),
        ([1, 2], [1.0, 1.0 + 1e-15]),
        ([2**60, 2**60 + 1], [1.0, 2.0]),
    ],
)
def test_any_finite_points_can_be_drawn(steps, values):
    lines = plot(Curve(steps, steps, values), 40, 6).splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= 40
    labels = [line.partition("┤")[0].strip() for line in lines[:6] if "┤" in line]
    assert len(labels) == len(set(labels))


def test_panels_of_a_figure_stand_below_each_other():
    curves = [Curve([0, end], [0, end], [y, 2 * y]) for end, y in ((10, 1.0), (20, 1e5))]
    figure = Figure("", [Panel("", "", [Line("", curve)]) for curve in curves])
    texts = [draw(figure, panel, 60, 4) for panel in figure.panels]
    assert texts[0].splitlines()[-1] == texts[1].splitlines()[-2]
    assert len(texts[1].splitlines()) == len(texts[0].splitlines()) + 1  # has labels


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
