"""Rooflines: log-log, the machine's lines, a point and a readable name for every kernel."""

import re
import xml.etree.ElementTree as ET

import pytest

from smallmind.charts.roofline import Point, roofline, roofline_chart

PEAKS, BANDWIDTHS = {"float32": 200e9}, {"16 MB": 100e9, "256 MB": 20e9}
CROWD = [Point(f"kernel_number_{i}", 0.5 + i / 1000, 2e9 + i * 1e7, "64x64") for i in range(40)]


def dots(drawn):
    return [tuple(map(float, x)) for x in re.findall(r'<circle [^>]*cx="(.*?)" cy="(.*?)"', drawn)]


def test_axes_are_logarithmic():
    points = [Point(name, x, 1e9 * x) for name, x in (("a", 0.1), ("b", 1.0), ("c", 10.0))]
    (x0, y0), (x1, y1), (x2, y2) = dots(roofline(points, PEAKS, BANDWIDTHS))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y0 > y1


def test_a_kernel_at_a_limit_is_on_its_line():
    drawn = roofline([Point("bound", 1.0, 20e9)], PEAKS, BANDWIDTHS)
    lines = [
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in re.findall('class="curve c0" points="(.*?)"', drawn)
    ]
    assert len(lines) == 3
    ((x, y),) = dots(drawn)
    (left, low), (right, high) = lines[1]  # of memory
    assert y == pytest.approx(low + (x - left) / (right - left) * (high - low), abs=0.3)


def test_every_name_is_readable():
    root = ET.fromstring(roofline(CROWD, PEAKS, BANDWIDTHS))
    texts = [x for x in root.iter() if x.tag.endswith("text") and "kernel" in (x.text or "")]
    ends = [(float(x.get("x")), 100 * (x.get("text-anchor") == "end"), x) for x in texts]
    boxes = [(x - width, float(text.get("y"))) for x, width, text in ends]
    assert len(boxes) == len(CROWD)
    for i, (x, y) in enumerate(boxes):
        for other, level in boxes[:i]:
            assert abs(y - level) >= 13 or abs(x - other) > 100


def test_no_name_crosses_the_line_of_a_peak():
    drawn = roofline([Point("a_kernel_at_its_peak", 100.0, 199e9)], PEAKS, BANDWIDTHS)
    *_, points = re.findall('class="curve c0" points="(.*?)"', drawn)
    level = float(points.split(",")[-1])
    (name,) = re.findall(r'<text [^>]*y="([^"]*)"[^>]*>a_kernel_at_its_peak<', drawn)
    assert abs(float(name) - level) >= 13


def test_nothing_is_drawn_without_operations_or_limits():
    copies = [Point("copy_columns", 0.0, 0.0)]
    assert not roofline(copies, PEAKS, BANDWIDTHS)
    assert not roofline_chart(CROWD, {"float32": 0.0}, BANDWIDTHS)
    assert roofline_chart(CROWD, PEAKS, BANDWIDTHS).startswith('<svg class="chart"')


def test_peaks_that_are_as_fast_share_a_line():
    peaks = {"float32": 200e9, "bfloat16": 800e9, "q8_0": 810e9}
    drawn = roofline([Point("a", 1.0, 20e9)], peaks, BANDWIDTHS)
    assert "float32: 200<" in drawn and "bfloat16, q8_0: 800<" in drawn


def test_a_name_beside_the_right_edge_is_left_of_its_dot():
    point = Point("a_kernel_with_a_very_long_name", 900.0, 100e9)
    root = ET.fromstring(roofline([point], PEAKS, BANDWIDTHS))
    (name,) = (x for x in root.iter() if x.tag.endswith("text") and x.text == point.name)
    assert name.get("text-anchor") == "end"
