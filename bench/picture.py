"""A picture for the README: a run's held-out loss over time, and what it wrote at three moments."""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from smallmind.charts.axis import format_tick, ticks
from smallmind.charts.svg import DARK, LIGHT
from smallmind.console.table import escape
from smallmind.views.run_view import open_view

WIDTH, HEIGHT = 840, 420
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 34, 200  # BOTTOM is where the axis of time is
LINES, LETTERS = 6, 30  # of a sample
STYLE = f"""svg {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ svg {{ {DARK} }} }}
.page {{ fill: var(--page); }} .panel {{ fill: var(--panel); }}
text {{ fill: var(--quiet); font: 13px system-ui, sans-serif; }}
.sample {{ fill: var(--ink); font: 13px ui-monospace, Menlo, Consolas, monospace; }}
.head {{ fill: var(--ink); font-weight: 600; }}
.grid {{ stroke: var(--line); }} .curve {{ fill: none; stroke: var(--c0); stroke-width: 2.5; }}
.mark {{ fill: var(--c1); }} .lead {{ stroke: var(--c1); stroke-dasharray: 2 4; }}"""


def run(options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Writes the picture of a run that had --val-every and --sample-every."""
    options.out.write_text(picture(options.run, options.at), encoding="utf-8")
    return {"picture": str(options.out), "machine": machine}


def picture(path: Path, steps: list[int]) -> str:
    """A run and the steps of three of its samples -> SVG."""
    view = open_view(path, fields=("val_loss",))
    curve, samples = view.curves["val_loss"].finite(), dict(view.samples())
    known = [step for step in samples if step in curve.steps]
    if missing := [step for step in steps if step not in known]:
        sys.exit(
            f"step {missing[0]} has no sample with an evaluation: there are "
            f"{', '.join(map(str, known)) or 'none'}; use the same --val-every and --sample-every"
        )
    end, low, high = curve.seconds[-1], min(curve.values) - 0.1, max(curve.values) + 0.1

    def place(seconds: float, loss: float) -> tuple[float, float]:
        across = LEFT + seconds / end * (WIDTH - LEFT - RIGHT)
        return across, TOP + (high - loss) / (high - low) * (BOTTOM - TOP)

    parts = [_text(LEFT - 44, 18, "held-out loss, nats per character")]
    for tick in ticks(low, high, 5):
        y = place(0, tick)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, format_tick(tick), 'text-anchor="end"'))
    for tick in ticks(0, end, 6):
        label = f"{format_tick(tick)} s"
        parts.append(_text(place(tick, low)[0], BOTTOM + 18, label, 'text-anchor="middle"'))
    points = [place(*pair) for pair in zip(curve.seconds, curve.values, strict=True)]
    parts.append(f'<path class="curve" d="M{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    width = (WIDTH - 2 * 16 + 10) / len(steps)
    for number, step in enumerate(steps):
        nearest = curve.steps.index(step)
        x, y = points[nearest]
        left = 16 + number * width
        parts.append(f'<path class="lead" d="M{x:.1f} {y:.1f}L{left + 12:.1f} {BOTTOM + 34}"/>')
        parts.append(f'<circle class="mark" r="4.5" cx="{x:.1f}" cy="{y:.1f}"/>')
        parts.append(
            f'<rect class="panel" rx="6" x="{left:.1f}" y="{BOTTOM + 34}" '
            f'width="{width - 10:.1f}" height="{HEIGHT - BOTTOM - 44}"/>'
        )
        head = f"after {curve.seconds[nearest]:.0f} s, loss {curve.values[nearest]:.2f}"
        parts.append(_text(left + 12, BOTTOM + 56, head, 'class="head"'))
        for line, words in enumerate(_lines(samples[step])):
            parts.append(_text(left + 12, BOTTOM + 82 + 20 * line, words, 'class="sample"'))
    title = "The held-out loss over time, and what the model writes at three moments"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>"
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>{"".join(parts)}</svg>\n'
    )


def _lines(sample: str) -> list[str]:
    """The first lines of a sample, wrapped."""
    lines = [part for line in sample.split("\n") if line for part in textwrap.wrap(line, LETTERS)]
    return lines[:LINES]


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
