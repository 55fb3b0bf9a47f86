"""Pictures of curves in files: SVG as it is drawn, PNG and PDF converted by CairoSVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smallmind.checks import InputError
from smallmind.cli.console import shorten

if TYPE_CHECKING:
    from smallmind.charts.svg import Axes
    from smallmind.views.panels import Chart

SUFFIXES = (".png", ".pdf", ".svg")
SCALE = 2  # pixels of a PNG to a unit of the SVG
LEGEND = 50  # characters of a name


def check_figure(flag: str, file: Path) -> None:
    """InputError if this kind of file cannot be written."""
    if file.suffix not in SUFFIXES:
        raise InputError(f"{flag}: the name {file} must end in {', '.join(SUFFIXES)}")
    if file.suffix != ".svg":
        try:
            import cairosvg  # noqa: F401
        except (ImportError, OSError):  # OSError: Cairo itself is missing
            raise InputError(
                f"{flag} {file} needs CairoSVG and the library Cairo: python -m pip install "
                f"cairosvg; {file.with_suffix('.svg')} needs neither"
            ) from None


def write_figure(panels: "Sequence[Axes]", title: str, file: Path) -> None:
    """Draws panels below each other."""
    from smallmind.charts.svg import picture
    from smallmind.files import durable

    content = picture(panels, title).encode()
    if file.suffix != ".svg":
        import cairosvg

        convert = cairosvg.svg2png if file.suffix == ".png" else cairosvg.svg2pdf
        content = convert(content, scale=SCALE)
    durable.write(file, [content])


def axes_of(chart: "Chart") -> "list[Axes]":
    """The panels of a chart over one axis, a colour for each run."""
    from smallmind.charts.svg import Axes, Line

    axes = []
    for panel in chart.panels:
        lines = []
        for number, name in enumerate(shorten(name, LEGEND) for name in chart.names):
            line, mean = panel.lines[number], panel.means[number]
            if line is not mean:
                lines.append(Line(name, line, number, faint=True))
            label = f"{name}: training, smoothed" if panel.marks else ""
            lines.append(Line(label, mean, number))
            if panel.marks:
                held_out = panel.marks[number]
                lines.append(Line(f"{name}: held-out", held_out, number, dots=True, dashed=True))
        title = f"{panel.title} ({panel.unit})" if panel.unit else panel.title
        x_range = 0.0, chart.x_end
        axes.append(Axes(lines, chart.x_name, title, chart.axis, x_range, panel.y_range))
    return axes
