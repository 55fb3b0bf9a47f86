"""Figures in files: SVG as it is, PNG and PDF with matplotlib as the canvas for that SVG."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from smallmind.checks import InputError
from smallmind.cli.flags import check_writable

if TYPE_CHECKING:
    from smallmind.charts.svg import Svg

SUFFIXES = (".png", ".pdf", ".svg")
INSTALL = "python -m pip install matplotlib"
INCH = 96  # units of the picture
POINT = 72 / INCH


def lacks_matplotlib(file: Path) -> bool:
    """Returns True if a file of this kind needs matplotlib, which is not installed."""
    return file.suffix != ".svg" and importlib.util.find_spec("matplotlib") is None


def check_figure(flag: str, file: Path) -> None:
    """Raises InputError if this kind of file is unknown, or it cannot be written here."""
    if file.suffix not in SUFFIXES:
        raise InputError(f"{flag}: the name {file} must end in {', '.join(SUFFIXES)}")
    check_writable(flag, file)


def save(picture: "Svg", file: Path) -> None:
    """Writes a picture of `charts.svg` to a file of one of SUFFIXES."""
    if file.suffix == ".svg":
        file.write_text(picture, encoding="utf-8")
        return
    from matplotlib.figure import Figure

    from smallmind.charts.svg import COLOURS

    root = ElementTree.fromstring(picture)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    figure = Figure(figsize=(width / INCH, height / INCH))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for element in root:
        given, kinds = element.attrib, element.get("class", "").split()
        colour = next((COLOURS[kind] for kind in kinds if kind in COLOURS), COLOURS["line"])
        if element.tag.endswith("text"):
            side = {"start": "left", "middle": "center", "end": "right"}[given["text-anchor"]]
            style: dict[str, Any] = {"ha": side, "fontsize": 13 * POINT, "parse_math": False}
            x, y = float(given["x"]), float(given["y"])
            axes.text(x, y, element.text or "", color=COLOURS["quiet"], **style)
        elif element.tag.endswith("polyline"):
            places = [map(float, place.split(",")) for place in given["points"].split()]
            is_faint = "faint" in kinds or "grid" in kinds
            axes.plot(
                *zip(*places, strict=True),
                color=colour,
                linewidth=POINT * (1 if is_faint else 2),
                linestyle="--" if "dashed" in kinds else "-",
                alpha=0.35 if "faint" in kinds else 1,
            )
        elif element.tag.endswith("circle"):
            axes.plot(float(given["cx"]), float(given["cy"]), "o", color=colour, markersize=4.5)
    figure.savefig(file, dpi=2 * INCH)
