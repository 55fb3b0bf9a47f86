"""A run on one page of HTML: model and text, curves, evaluations, samples, settings.

The page needs nothing else: no script, and no file from elsewhere.
"""

import dataclasses
import math
import shlex
from collections.abc import Iterable
from os import PathLike
from typing import Any

from smallmind.charts import svg
from smallmind.charts.curve import Curve
from smallmind.charts.figure import Figure, Line, Panel, losses_of, noisy
from smallmind.checks import InputError, from_json, number, whole
from smallmind.console.activity import duration
from smallmind.console.table import Table, escape
from smallmind.files import durable
from smallmind.runs.files import PROFILE
from smallmind.settings.settings import SECTIONS
from smallmind.training.operations import usage_text
from smallmind.views.run_view import PLOTTED, RunView, open_view

FIELDS = (*PLOTTED, "tokens_per_second", "memory", "peak_memory")
SHOWN = 12  # evaluations in the table
SAMPLES_SHOWN = 40
LEAST = 0.005  # share of the time below which an operation is left out
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }}
main {{ max-width: 880px; margin: 0 auto; padding: 24px 16px 64px; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin: 40px 0 8px; }}
p {{ margin: 4px 0 12px; max-width: 68ch; }}
.quiet {{ color: var(--quiet); }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin: 20px 0; }}
.figure {{ background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; }}
.figure b {{ display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ color: var(--quiet); font-weight: 600; }}
.settings td + td {{ white-space: normal; overflow-wrap: anywhere; }}
pre {{ background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.45 ui-monospace, Menlo, Consolas,
  monospace; }}
.bar {{ display: grid; grid-template-columns: minmax(120px, 220px) 1fr 110px; gap: 8px;
  align-items: center; font-size: .95rem; margin: 2px 0; }}
.bar i {{ display: block; height: 12px; border-radius: 3px; background: var(--c0);
  min-width: 1px; }}
.bar span {{ overflow-wrap: anywhere; }}
.bar span:last-child {{ text-align: right; font-variant-numeric: tabular-nums; }}
.warning {{ border-left: 4px solid var(--c1); padding-left: 10px; }}
summary {{ cursor: pointer; }}
@media (max-width: 560px) {{ svg.chart text {{ font-size: 20px; }}
  .bar {{ grid-template-columns: 110px 1fr 84px; font-size: .85rem; }} }}
@media print {{ body {{ font-size: 12px; }} main {{ max-width: none; padding: 0; }}
  h2 {{ break-after: avoid; }} pre, svg, tr, .bar {{ break-inside: avoid; }}
  .scroll {{ overflow: visible; }} th, td {{ white-space: normal; }}
  details:not([open]) {{ display: none; }} }}
</style></head><body><main>
{body}
</main></body></html>
"""


def report(path: str | PathLike[str]) -> str:
    """The directory of a run -> the page. InputError unless this version can read the run."""
    view = open_view(path, FIELDS)
    if view.settings is None:
        raise InputError(f"{path} cannot be shown: {view.problem}")
    parts = (
        _head(view),
        _figures(view),
        _section("Loss", svg.chart(losses_of(_curve(view, "loss"), _curve(view, "val_loss")))),
        _evaluations(view),
        _course(view),
        _samples(view),
        _profile(view),
        _health(view),
        _use(view),
        _settings(view),
    )
    title = f"{view.path.resolve().name}: training report"
    return PAGE.format(title=escape(title), style=svg.STYLE, body="\n".join(filter(None, parts)))


def _head(view: RunView) -> str:
    assert view.settings
    model, training = view.settings.model, view.settings.training
    tokens = model.block_size * view.settings.run.batch_size * training.grad_accum_steps
    parts = [model.norm, model.position, model.mlp]
    count = "" if view.parameters is None else f" of {view.parameters:,} parameters"
    trained = f", trained on <b>{escape(view.text)}</b>" if view.text else ""
    steps = (
        f" {training.steps:,} steps of {tokens:,} tokens with {escape(training.optimizer)}, at a "
        f"learning rate of {training.learning_rate:g}."
    )
    return (
        f"<h1>{escape(view.path.resolve().name)}</h1>"
        f'<p class="quiet">{view.state.value.capitalize()}</p>'
        f"<p>A language model{count}{trained}: {model.n_layer} layers of {model.n_embd} channels, "
        f"{model.n_head} heads, windows of {model.block_size:,} tokens, a vocabulary of "
        f"{model.vocab_size:,}; its parts are {escape(', '.join(parts))}.{steps * bool(view.steps)}"
        "</p>"
    )


def _figures(view: RunView) -> str:
    """The figures that people look for first."""
    figures = []
    best, end = view.best or {}, view.final or {}
    if _is_number(end.get("final_loss")):
        figures.append(("Whole held-out text", f"{end['final_loss']:.4f}", "nats per token"))
    if best:
        where = f"after step {best['step']:,}"
        figures.append(("Best evaluation", f"{best['val_loss']:.4f}", where))
    bits = end.get("final_bits_per_byte", best.get("bits_per_byte"))
    if _is_number(bits):
        figures.append(("Bits per byte", f"{bits:.3f}", "held-out"))
    if view.steps is not None:
        figures.append(("Steps", f"{view.step:,}", f"of {view.steps:,}"))
    if view.seconds:
        figures.append(("Time", duration(view.seconds), "of training"))
    if rates := sorted(_curve(view, "tokens_per_second").values):
        figures.append(("Speed", f"{rates[len(rates) // 2]:,.0f}", "tokens per second"))
    if peaks := _curve(view, "peak_memory").values:
        figures.append(("Memory", f"{max(peaks) / 1e6:,.0f} MB", "at the peak"))
    boxes = "".join(
        f'<div class="figure"><span class="quiet">{name}</span><b>{escape(value)}</b>'
        f'<span class="quiet">{escape(unit)}</span></div>'
        for name, value, unit in figures
    )
    used = usage_text(view.usage)
    return f'<div class="figures">{boxes}</div>' * bool(boxes) + f"<p>{escape(used)}.</p>" * bool(
        used
    )


def _evaluations(view: RunView) -> str:
    rows = [row for row in view.evaluations if _is_number(row.get("val_loss"))]
    if not rows:
        return ""
    best = min(rows, key=lambda row: row["val_loss"])
    chosen = {round(i * (len(rows) - 1) / (SHOWN - 1)) for i in range(SHOWN)}
    chosen |= {rows.index(best)}
    columns = {
        "training loss": ("train_loss", ".4f"),
        "held-out loss": ("val_loss", ".4f"),
        "perplexity": ("perplexity", ",.3f"),
        "bits/char": ("bits_per_character", ".3f"),
        "bits/byte": ("bits_per_byte", ".3f"),
        "next token right": ("accuracy", ".1%"),
    }
    shown = [row for i, row in enumerate(rows) if i in chosen]
    cells = [
        [
            f"{row['step']:,}",
            *(
                format(row[x], kind) if _is_number(row.get(x)) else ""
                for x, kind in columns.values()
            ),
        ]
        for row in shown
    ]
    left_out = len(rows) - len(shown)
    note = f'<p class="quiet">{left_out} more in metrics.jsonl.</p>' if left_out else ""
    table = Table("", cells, ("step", *columns), best=shown.index(best)).html()
    table = f'<div class="scroll">{table}</div>{note}'
    return _section("Evaluations", f"<p>On held-out text; the best one is bold.</p>{table}")


def _course(view: RunView) -> str:
    """The other curves over the steps."""
    rate, norm, speed, memory = (
        _curve(view, name) for name in ("lr", "grad_norm", "tokens_per_second", "memory")
    )
    megabytes = Curve(memory.steps, memory.seconds, [value / 1e6 for value in memory.values])
    panels = [
        Panel("learning rate", "", [Line("", rate)], is_small=True),
        Panel("norm of the gradient", "before clipping", noisy("", norm), is_small=True),
        Panel("speed", "tokens per second", [Line("", speed)], from_zero=True, is_small=True),
        Panel("memory of the process", "MB", [Line("", megabytes)], from_zero=True, is_small=True),
    ]
    title = "Learning rate, norm of the gradient, speed and memory by step"
    return _section("Course of the run", svg.chart(Figure(title, panels)))


def _samples(view: RunView) -> str:
    """Texts that the model wrote, the last one first."""
    samples = view.samples()
    if not samples:
        return ""
    step, text = samples[-1]
    body = f"<p>After step {step:,}:</p><pre>{escape(text)}</pre>"
    earlier = _spread(samples[:-1], SAMPLES_SHOWN)
    if earlier:
        texts = "".join(
            f"<p>After step {step:,}:</p><pre>{escape(text)}</pre>"
            for step, text in reversed(earlier)
        )
        count = "1 earlier one" if len(earlier) == 1 else f"{len(earlier)} earlier ones"
        body += f"<details><summary>{count}</summary>{texts}</details>"
    return _section("What the model writes", body)


def _profile(view: RunView) -> str:
    """Where the time went, if the run was profiled: each operation without those inside it."""
    try:
        with durable.open_regular(view.path / PROFILE) as file:
            rows = from_json(file.read())["rows"]
        own: dict[str, float] = {}
        for row in rows:
            own[row["path"][-1]] = own.get(row["path"][-1], 0.0) + whole(row["own"]) / 1e9
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""
    total = sum(own.values())
    if not total > 0:
        return ""
    longest = max(own.values())
    bars = "".join(
        f'<div class="bar"><span>{escape(name).replace("_", "_<wbr>")}</span>'
        f'<i style="width:{100 * part / longest:.2f}%"></i>'
        f"<span>{part:.2f} s, {part / total:.0%}</span></div>"
        for name, part in sorted(own.items(), key=lambda item: -item[1])
        if part >= LEAST * total
    )
    measured = f"{total:.1f} seconds of training were measured, each in the innermost operation."
    return _section("Where the time went", f"<p>{measured}</p>{bars}")


def _health(view: RunView) -> str:
    """Problems: findings, rollbacks, warnings, failures."""
    problems, checks = view.notes, view.health_checks
    if not problems:
        count = "1 check" if checks == 1 else f"{checks} checks"
        return _section("Health", f"<p>{count}, no problems.</p>") if checks else ""
    shown = _spread(problems, SAMPLES_SHOWN)
    lines = "".join(f'<p class="warning">{escape(problem)}</p>' for problem in shown)
    left_out = len(problems) - len(shown)
    note = f'<p class="quiet">{left_out} more in metrics.jsonl.</p>' if left_out else ""
    return _section("Health", lines + note)


def _use(view: RunView) -> str:
    assert view.settings
    name = view.path.resolve().name
    run, file = shlex.quote(name), shlex.quote(f"{name}.gguf")
    lines = [
        f'smallmind generate {run} --prompt "..."',
        f"smallmind evaluate {run}",
        f"smallmind export {run} --to gguf {file}",
        f"model, tokenizer = smallmind.load({name!r})  # in Python",
    ]
    if view.steps is not None:
        lines.insert(2, f"smallmind train --resume {run} --steps {2 * view.steps}")
    body = "<p>In the directory that holds the run:</p>"
    return _section("How to use it", f"{body}<pre>{escape(chr(10).join(lines))}</pre>")


def _settings(view: RunView) -> str:
    """The chosen settings, then all."""
    chosen, everything = [], []
    for name, kind in SECTIONS.items():
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        for field, value in dataclasses.asdict(getattr(view.settings, name)).items():
            everything.append((f"{name}.{field}", value))
            if value != defaults[field]:
                chosen.append((f"{name}.{field}", value))
    versions = [
        (name, view.saved[name])
        for name in ("smallmind", "python", "numpy", "text_sha256")
        if name in view.saved
    ]
    return (
        _section("Settings that differ from the defaults", _table(chosen))
        + f"<details><summary>All settings</summary>{_table(everything)}</details>"
        + _section("Made with", _table(versions))
    )


def _curve(view: RunView, name: str) -> Curve:
    return view.curves[name].finite()


def _is_number(value: Any) -> bool:
    return math.isfinite(number(value))


def _spread(items: list[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    if not (cells := [(name, str(value)) for name, value in rows]):
        return "<p>None.</p>"
    return f'<div class="scroll settings">{Table("", cells, align="<<").html()}</div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""
