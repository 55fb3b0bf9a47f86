"""The plot of `smallmind schedule --plot`, read back from what was drawn."""

import pytest

from smallmind.cli.figures import draw_curves

figure = pytest.importorskip("matplotlib.figure")


@pytest.fixture
def drawn(monkeypatch):
    """The panels of every figure that is saved: title -> xs and ys."""
    panels: list[dict] = []
    save = figure.Figure.savefig

    def savefig(self, *arguments, **settings):
        shown = [panel for panel in self.axes if panel.axison]
        panels.append({panel.get_title("left"): panel.lines[0].get_data() for panel in shown})
        save(self, *arguments, **settings)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    return panels


def test_every_curve_gets_a_panel_and_the_file_is_a_picture(tmp_path, drawn, cli):
    file = tmp_path / "curves.png"
    printed = cli("schedule --recipe gpt2 --min-lr 0 --steps 5000 --plot", file).flat
    assert file.read_bytes().startswith(b"\x89PNG")
    assert f"Wrote the plot to {file}" in printed
    names = ["constant", "cosine", "one-cycle", "linear", "step", "wsd", "plateau"]
    assert list(drawn[0]) == names
    for xs, ys in drawn[0].values():
        assert xs[0] == 1 and xs[-1] == 5000 and 1000 < len(xs) <= 2001
        assert max(ys) == pytest.approx(1e-3, rel=0.01)
    assert drawn[0]["linear"][1][-1] < 1e-6


def test_one_curve_can_be_plotted_alone(tmp_path, drawn):
    draw_curves({"line": ([1, 2, 3], [3.0, 2.0, 5.0])}, "x", "y", tmp_path / "line.svg")
    xs, ys = drawn[0]["line"]
    assert list(xs) == [1, 2, 3] and list(ys) == [3.0, 2.0, 5.0]
    assert (tmp_path / "line.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")
