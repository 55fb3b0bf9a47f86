"""The plot of `smallmind schedule --plot`, read back from the file."""

from xml.etree import ElementTree

import pytest

from smallmind.charts.svg import LEFT, RIGHT, SMALL, WIDTH
from tests.cli.test_plot import SVG, curves_of

FLAGS = "schedule --recipe gpt2 --min-lr 0 --steps 5000 --plot"


def test_every_schedule_gets_a_panel(tmp_path, cli):
    file = tmp_path / "curves.svg"
    assert f"Wrote the plot to {file}" in cli(FLAGS, file).flat
    picture = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    texts = [text.text for text in picture.iter(f"{SVG}text") if text.get("x") == "2.0"]
    assert texts == ["constant", "cosine", "one-cycle", "linear", "step", "wsd", "plateau"]
    curves = curves_of(file)
    for _, places in curves:
        assert LEFT <= places[0][0] < LEFT + 1 and places[-1][0] == WIDTH - RIGHT
        heights = [y for _, y in places]
        assert max(heights) - min(heights) <= SMALL and len(places) >= 100
    assert len(curves) == len(texts)


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_file_of_another_kind_is_drawn_by_matplotlib(tmp_path, suffix, begin, cli):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"curves.{suffix}"
    cli(FLAGS, file)
    assert file.read_bytes().startswith(begin)
