"""A page of HTML that needs nothing else: no script, and no file from elsewhere."""

from collections.abc import Sequence
from typing import Any

from smallmind.charts import svg
from smallmind.charts.figure import Figure
from smallmind.console.table import Table, escape

LARGE = svg.Geometry(large=300, has_legend=False)  # the chart that people look at first
CELL = svg.Geometry(
    width=400, left=72, large=120, small=120, ticks=4, has_legend=False, kind="cell"
)
NARROW = svg.Geometry(width=400, left=56, large=260, ticks=4, has_legend=False, kind="narrow")
STYLE = (
    svg.STYLE
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 992px; margin: 0 auto; padding: 32px 16px 64px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 40px 0 8px; }
p { margin: 4px 0 12px; max-width: 72ch; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); }
.figures { display: grid; grid-template-columns: repeat(6, 1fr); gap: 10px; margin: 20px 0; }
.figure { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; font-size: .8125rem; line-height: 1.35; }
.figure b { display: block; font-size: 1.3rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(2, 1fr); gap: 16px 24px; margin: 12px 0; }
svg.chart.cell text, svg.chart.narrow text { font-size: 14px; }
svg.chart.narrow { display: none; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 4px 0; font-size: .9rem;
  max-width: none; }
.legend svg { display: inline-block; width: 26px; height: 8px; margin: 0 7px 2px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .9375rem; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--quiet); font-weight: 600; vertical-align: bottom; white-space: normal; }
.scroll td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 4em; }
.settings { max-width: 640px; }
.answers td { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; }
.settings td + td { white-space: normal; overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.5 ui-monospace, Menlo, Consolas,
  monospace; margin: 8px 0; }
.bar { display: grid; grid-template-columns: minmax(120px, 220px) 1fr 110px; gap: 8px;
  align-items: center; font-size: .9rem; margin: 2px 0; }
.bar i { display: block; height: 12px; border-radius: 3px; background: var(--c0);
  min-width: 1px; }
.bar span { overflow-wrap: anywhere; }
.bar span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.warning { border-left: 4px solid var(--c1); padding-left: 10px; }
summary { cursor: pointer; margin: 8px 0; }
@media (max-width: 800px) { .figures { grid-template-columns: repeat(3, 1fr); } }
@media screen and (max-width: 700px) { svg.chart.wide text { font-size: 18px; }
  .charts { grid-template-columns: 1fr; } }
@media screen and (max-width: 560px) {
  main { padding-top: 20px; }
  .figures { gap: 8px; }
  .figure { padding: 8px; font-size: .75rem; }
  .figure b { font-size: 1.05rem; }
  .bar { grid-template-columns: 110px 1fr 84px; font-size: .85rem; }
}
@media screen and (max-width: 760px) {
  .scroll thead { display: none; }
  .scroll table, .scroll tbody { display: block; }
  .scroll tr { display: grid; grid-template-columns: repeat(3, 1fr); gap: 2px 12px;
    padding: 8px 0; border-bottom: 1px solid var(--line); }
  .scroll td { display: flex; flex-direction: column; text-align: left !important; border: 0;
    padding: 0; white-space: normal; overflow-wrap: anywhere; }
  .scroll td:first-child { grid-column: 1 / -1; flex-direction: row; gap: 6px; font-weight: 600; }
  .scroll td[data-head]::before { content: attr(data-head); color: var(--quiet);
    font-size: .75rem; font-weight: normal; }
  .scroll td:first-child::before { font-size: inherit; flex: none; }
  .settings table { table-layout: fixed; font-size: .8125rem; }
  .settings td { padding: 4px 0; overflow-wrap: anywhere; white-space: normal; }
  .settings td:first-child { width: 62%; padding-right: 8px; }
  .several td:first-child { width: 40%; }
}
@media screen and (max-width: 480px) { svg.chart.wide { display: none; }
  svg.chart.narrow { display: block; } }
@media print { @page { margin: 14mm; }
  body { font-size: 12px; } main { max-width: none; padding: 0; }
  h1 { font-size: 20px; } h2 { break-after: avoid; margin: 20px 0 6px; font-size: 15px; }
  .figures { grid-template-columns: repeat(6, 1fr); gap: 6px; }
  .figure { padding: 6px 8px; font-size: 11px; } .figure b { font-size: 14px; }
  pre, svg, tr, .bar, .figure { break-inside: avoid; } pre { font-size: 11.5px; }
  table, .bar, .legend { font-size: 11.5px; }
  h2 + p { break-after: avoid; } .bar i { print-color-adjust: exact; }
  .scroll { overflow: visible; } th, td { white-space: normal; }
  details:not([open]) { display: none; } }
"""
    + "".join(
        f".legend .c{i} {{ stroke: var(--c{i}); stroke-width: 3; fill: none; }}\n"
        for i in range(svg.N_COLOURS)
    )
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style></head><body><main>
{body}
</main></body></html>
"""


def page(title: str, parts: Sequence[str]) -> str:
    """Returns the page of these parts, which are HTML, and without those that are empty."""
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(filter(None, parts)))


def section(title: str, body: str) -> str:
    """Returns a heading, which is text, and what is below it; "" if that is empty."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def figures(cards: Sequence[tuple[str, str, str]]) -> str:
    """Shows cards of a name, a value and its unit, side by side."""
    boxes = "".join(
        f'<div class="figure"><span class="quiet">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="quiet">{escape(unit)}</span></div>'
        for name, value, unit in cards
    )
    return f'<div class="figures">{boxes}</div>' if boxes else ""


def warnings(notes: Sequence[str]) -> str:
    """Returns a paragraph that stands out for each note."""
    return "".join(f'<p class="warning">{escape(note)}</p>' for note in notes)


def large_chart(figure: Figure) -> str:
    """-> a figure as wide as the page, below the names of its lines, and another for phones."""
    drawn = svg.chart(figure, LARGE) + svg.chart(figure, NARROW)
    names = "".join(
        f'<span><svg viewBox="0 0 26 8" aria-hidden="true"><path class="{escape(kind)}" '
        f'd="M0 4H26"/></svg>{escape(name)}</span>'
        for kind, name in svg.legend(figure.panels[0])
    )
    return drawn and (f'<p class="legend">{names}</p>' if names else "") + drawn


def small_charts(drawn: Sequence[Figure]) -> str:
    """Shows figures side by side, those that have something to show."""
    found = "".join(f"<div>{chart}</div>" for x in drawn if (chart := svg.chart(x, CELL)))
    return f'<div class="charts">{found}</div>' if found else ""


def table(rows: Sequence[Sequence[str]], heads: Sequence[str], best: int | None = None) -> str:
    """Returns rows below heads; on a phone each row is a list of them."""
    return f'<div class="scroll">{Table("", rows, heads, best=best).html()}</div>'


def settings_table(rows: Sequence[tuple[str, Any]]) -> str:
    """Returns names and values of any length."""
    if not (cells := [(name, str(value)) for name, value in rows]):
        return "<p>None.</p>"
    return f'<div class="settings">{Table("", cells, align="<<").html()}</div>'
