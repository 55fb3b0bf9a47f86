"""Heat maps, histograms and lines of numbers, which lessons draw."""

from xml.etree import ElementTree

import numpy as np
import pytest

from smallmind.charts.figure import lines
from smallmind.charts.heat_map import MAX_CELLS, NEGATIVE, POSITIVE, heat_map
from smallmind.charts.histogram import histogram
from smallmind.charts.svg import picture

SVG = "{http://www.w3.org/2000/svg}"


def cells(svg):
    """The cells of a heat map: what each says, and its fill and opacity."""
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [
        (rect.find(f"{SVG}title").text, rect.get("fill"), float(rect.get("fill-opacity")))
        for rect in found
        if rect.find(f"{SVG}title") is not None
    ]


def test_a_cell_has_the_colour_of_its_sign_and_the_shade_of_its_size():
    svg = heat_map("<title>", [[4.0, -1.0], [0.0, 0.25]], ["a", "b"], ["<c>", "d"])
    assert cells(svg) == [
        ("row a, column <c>: 4.000", POSITIVE, 1.0),
        ("row a, column d: -1.000", NEGATIVE, 0.5),
        ("row b, column d: 0.250", POSITIVE, 0.25),
    ]


def test_a_heat_map_need_not_be_square_and_may_be_empty():
    assert len(cells(heat_map("wide", np.ones((2, 7)).tolist()))) == 14
    assert cells(heat_map("nothing", [[0.0, 0.0]])) == []


def test_of_a_large_table_each_cell_is_the_largest_of_several():
    values = np.zeros((2 * MAX_CELLS, 2 * MAX_CELLS))
    values[5, 8] = -3.0
    values[4, 8] = 1.0
    assert cells(heat_map("large", values.tolist())) == [("row 5, column 8: -3.000", NEGATIVE, 1.0)]


def test_a_histogram_has_the_share_of_each_range():
    figure = histogram("sizes", {"a": [0, 0, 0, 1], "b": [1, np.nan, np.inf]}, bins=2)
    (panel,) = figure.panels
    assert panel.lines[0].points.values == [0.0, 0.75, 0.75, 0.25, 0.25, 0.0]
    assert panel.lines[1].points.values == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert panel.y_range[1] > 1.0  # a single spike is shown whole


@pytest.mark.parametrize("values", [{"a": []}, {"a": [2.0, 2.0]}, {"a": [np.nan]}])
def test_a_histogram_of_hardly_anything_is_drawn(values):
    ElementTree.fromstring(picture(histogram("few", values)))


def test_lines_share_an_axis_and_have_colours_of_their_own():
    figure = lines("waves", {"a": [1.0, 2.0], "b": [3.0, np.nan]}, [-1.0, 1.0], "distance")
    svg = picture(figure)
    assert figure.x_range == (-1.0, 1.0) and "distance" in svg
    assert 'class="curve c0"' in svg and 'class="curve c1"' in svg
