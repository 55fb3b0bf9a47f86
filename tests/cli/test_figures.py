"""Pictures of curves in files, read back from what was drawn."""

import re
import sys
from xml.etree import ElementTree

import pytest

from smallmind.charts.curve import Curve
from smallmind.charts.svg import Axes, Line
from smallmind.cli import main
from smallmind.cli.figures import write_figure
from tests.cli.test_cli import assert_refused, flat

SVG = "{http://www.w3.org/2000/svg}"


def panels_of(file):
    """The panels of an SVG: the points of each line, and the text around them."""
    found = []
    for group in ElementTree.parse(file).iter(f"{SVG}g"):
        lines = [
            [tuple(map(float, point.split(","))) for point in line.get("points").split()]
            for line in group.iter(f"{SVG}polyline")
        ]
        found.append((lines, [text.text for text in group.iter(f"{SVG}text")]))
    return found


def schedule_to(file):
    flags = ["--recipe", "gpt2", "--min-lr", "0", "--steps", "5000", "--plot", str(file)]
    return ["schedule", *flags]


def test_every_schedule_has_a_panel_from_zero(tmp_path, capsys):
    file = tmp_path / "curves.svg"
    assert main(schedule_to(file)) == 0
    assert f"Wrote the plot to {file}" in flat(capsys.readouterr().out)
    panels = panels_of(file)
    names = ["constant", "cosine", "one-cycle", "linear", "step", "wsd", "plateau"]
    assert [texts[-1] for _, texts in panels] == [f"{name}: learning rate" for name in names]
    tops = [min(y for _, y in line) for (line,), _ in panels]
    assert max(tops) - min(tops) <= 3  # all rise to the same rate on the same scale
    (linear,), texts = panels[3]
    assert "0" in texts and linear[-1][1] - tops[3] > 150


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_cairo_makes_other_files(tmp_path, suffix, begin):
    try:
        import cairosvg  # noqa: F401
    except (ImportError, OSError):
        pytest.skip("CairoSVG or Cairo is missing")
    file = tmp_path / f"line.{suffix}"
    line = Line("line", Curve([1, 2, 3], [0, 0, 0], [3.0, 2.0, 5.0]))
    write_figure([Axes([line], "x", "y")], "title", file)
    assert file.read_bytes().startswith(begin)


def test_without_cairo_only_svg_is_written_and_the_error_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    message = "needs CairoSVG and the library Cairo: python -m pip install cairosvg; "
    assert_refused(capsys, schedule_to(tmp_path / "a.png"), message)
    advised = re.search(r"(\S+\.svg) needs neither", message_of(capsys, tmp_path)).group(1)
    assert main(schedule_to(advised)) == 0


def message_of(capsys, folder):
    capsys.readouterr()
    assert main(schedule_to(folder / "a.png")) == 2
    return flat(capsys.readouterr().err)
