"""Pictures of lessons: a notebook shows them, and each is a file beside the lesson."""

import sys
from pathlib import Path

from smallmind.charts.figure import Figure
from smallmind.charts.svg import Svg, picture


def draw(name: str, chart: Figure | Svg) -> None:
    """Writes a chart to NAME.svg in the working directory, and shows it if this is a notebook."""
    svg = picture(chart) if isinstance(chart, Figure) else chart
    path = Path(f"{name}.svg")
    path.write_text(svg, encoding="utf-8")
    print(f"Picture: {path} (open it in a browser)")
    shell = sys.modules.get("IPython")
    if shell and shell.get_ipython():
        shell.display.display(svg)
