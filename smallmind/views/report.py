"""A run on one page of HTML: what was trained on what, curves, evaluations, samples, settings.

The page needs nothing else: no script, and no file from elsewhere.
"""

import dataclasses
import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from smallmind import durable
from smallmind.activity import duration
from smallmind.checks import InputError
from smallmind.nn.network import declare_parameters
from smallmind.runs.files import CONFIG, PROFILE, SAMPLES, name_of
from smallmind.runs.metrics import read_metrics
from smallmind.settings import SECTIONS, Settings
from smallmind.views import svg
from smallmind.views.curve import Curve

SHOWN = 12  # evaluations in the table
DOTS = 40  # evaluations up to which each is a dot
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
h3 {{ font-size: 1rem; margin: 20px 0 4px; }}
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
tr.best td {{ font-weight: 700; }}
td.value {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }}
pre {{ background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.45 ui-monospace, Menlo, Consolas,
  monospace; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .9rem; }}
.key {{ display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }}
.bar {{ display: grid; grid-template-columns: minmax(120px, 220px) 1fr 110px; gap: 8px;
  align-items: center; font-size: .95rem; margin: 2px 0; }}
.bar i {{ display: block; height: 12px; border-radius: 3px; background: var(--c0);
  min-width: 1px; }}
.bar span {{ overflow-wrap: anywhere; }}
.bar span:last-child {{ text-align: right; font-variant-numeric: tabular-nums; }}
.warning {{ border-left: 4px solid var(--c1); padding-left: 10px; }}
summary {{ cursor: pointer; }}
@media (max-width: 560px) {{ svg.chart text {{ font-size: 23px; }}
  .bar {{ grid-template-columns: 110px 1fr 84px; font-size: .85rem; }} }}
@media print {{ main {{ max-width: none; }} section, pre, svg {{ break-inside: avoid; }}
  details:not([open]) {{ display: none; }} }}
</style></head><body><main>
{body}
</main></body></html>
"""


class _Run(NamedTuple):
    """What a report is about."""

    path: Path
    settings: Settings
    saved: dict[str, Any]  # config.json
    rows: list[dict[str, Any]]  # of the metrics, one per step


def report(path: Path) -> str:
    """The directory of a run -> the page. InputError if it is no run, or has no metrics yet."""
    try:
        with durable.open_regular(path / CONFIG) as file:
            saved = json.loads(file.read())
        settings = Settings.from_dict(saved)
    except OSError as error:
        raise InputError(f"{path} is not a run: {CONFIG}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a run: {CONFIG}: {error}") from None
    run = _Run(path, settings, saved, read_metrics(path).rows)
    parts = (
        _head(run),
        _figures(run),
        _loss(run),
        _evaluations(run),
        _course(run),
        _samples(run),
        _profile(run),
        _health(run),
        _use(run),
        _settings(run),
    )
    title = f"{path.resolve().name}: training report"
    return PAGE.format(title=_text(title), style=svg.STYLE, body="\n".join(filter(None, parts)))


def _head(run: _Run) -> str:
    model, training = run.settings.model, run.settings.training
    tokens = model.block_size * run.settings.run.batch_size * training.grad_accum_steps
    parts = [model.norm, model.position, model.mlp]
    return (
        f"<h1>{_text(run.path.resolve().name)}</h1>"
        f"<p>A language model of {_parameters(run):,} parameters, trained on "
        f"<b>{_text(name_of(run.settings.run.text))}</b>: {model.n_layer} layers of "
        f"{model.n_embd} channels, {model.n_head} heads, windows of {model.block_size:,} tokens, "
        f"a vocabulary of {model.vocab_size:,}; its parts are {_text(', '.join(parts))}. "
        f"{training.steps:,} steps of {tokens:,} tokens with {_text(training.optimizer)}, at a "
        f"learning rate of {training.learning_rate:g}.</p>"
    )


def _figures(run: _Run) -> str:
    """The figures that people look for first."""
    steps = [row for row in run.rows if "loss" in row]
    evaluated = [row for row in run.rows if _is_number(row.get("val_loss"))]
    ends = [row for row in run.rows if _is_number(row.get("final_loss"))]
    final: dict[str, Any] = ends[-1] if ends else {}
    figures = []
    if final:
        figures.append(("Whole held-out text", f"{final['final_loss']:.4f}", "nats per token"))
    if _is_number(final.get("final_bits_per_byte")):
        figures.append(("Bits per byte", f"{final['final_bits_per_byte']:.3f}", "held-out"))
    if evaluated:
        best = min(evaluated, key=lambda row: row["val_loss"])
        where = f"after step {best['step']:,}"
        figures.append(("Best evaluation", f"{best['val_loss']:.4f}", where))
        if not final and _is_number(best.get("bits_per_byte")):
            figures.append(("Bits per byte", f"{best['bits_per_byte']:.3f}", "held-out"))
    if steps:
        last, planned = steps[-1], run.settings.training.steps
        figures.append(("Steps", f"{run.rows[-1]['step']:,}", f"of {planned:,}"))
        if _is_number(last.get("elapsed_seconds")):
            figures.append(("Time", duration(last["elapsed_seconds"]), "of training"))
        rates = sorted(_column(run.rows, "tokens_per_second")[1])
        if rates:
            figures.append(("Speed", f"{rates[len(rates) // 2]:,.0f}", "tokens per second"))
        if _is_number(last.get("peak_memory")):
            figures.append(("Memory", f"{last['peak_memory'] / 1e6:,.0f} MB", "at the peak"))
    boxes = "".join(
        f'<div class="figure"><span class="quiet">{name}</span><b>{_text(value)}</b>'
        f'<span class="quiet">{_text(unit)}</span></div>'
        for name, value, unit in figures
    )
    return f'<div class="figures">{boxes}</div>' if boxes else ""


def _loss(run: _Run) -> str:
    """Training and held-out loss over the steps."""
    x, y = _column(run.rows, "loss")
    evaluated_x, evaluated_y = _column(run.rows, "val_loss")
    curves = [
        svg.Line("every step", x, y, 0, faint=True),
        svg.Line("training loss, smoothed", x, _smoothed(y), 0),
        svg.Line("held-out loss", evaluated_x, evaluated_y, 1, dots=len(evaluated_x) <= DOTS),
    ]
    drawing = svg.chart(curves, "step", "nats per token", "Training and held-out loss by step")
    return _section("Loss", drawing and _legend(curves) + drawing)


def _evaluations(run: _Run) -> str:
    rows = [row for row in run.rows if _is_number(row.get("val_loss"))]
    if not rows:
        return ""
    best = min(rows, key=lambda row: row["val_loss"])
    chosen = {round(i * (len(rows) - 1) / (SHOWN - 1)) for i in range(SHOWN)}
    chosen |= {rows.index(best)}
    columns = {
        "training loss": ("train_loss", ".4f"),
        "held-out loss": ("val_loss", ".4f"),
        "perplexity": ("perplexity", ",.4g"),
        "bits/character": ("bits_per_character", ".3f"),
        "bits/byte": ("bits_per_byte", ".3f"),
        "next token right": ("accuracy", ".1%"),
    }
    body = ""
    for i in sorted(i for i in chosen if i < len(rows)):
        row = rows[i]
        cells = [f"{row['step']:,}"]
        for name, kind in columns.values():
            cells.append(format(row[name], kind) if _is_number(row.get(name)) else "")
        mark = ' class="best"' if row is best else ""
        body += f"<tr{mark}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    heads = "".join(f"<th>{name}</th>" for name in ("step", *columns))
    left_out = len(rows) - body.count("<tr")
    note = f'<p class="quiet">{left_out} more in metrics.jsonl.</p>' if left_out else ""
    table = f'<div class="scroll"><table><tr>{heads}</tr>{body}</table></div>{note}'
    return _section("Evaluations", f"<p>On held-out text; the best one is bold.</p>{table}")


def _course(run: _Run) -> str:
    """What else changed over the steps."""
    parts = []
    for name, title, unit in (
        ("lr", "Learning rate", ""),
        ("grad_norm", "Norm of the gradient", "before clipping"),
        ("tokens_per_second", "Speed", "tokens per second"),
        ("memory", "Memory of the process", "MB"),
    ):
        x, y = _column(run.rows, name)
        y = [value / 1e6 for value in y] if name == "memory" else y
        curves = [svg.Line(title, x, y, 0, faint=name == "grad_norm")]
        if name == "grad_norm":
            curves.append(svg.Line(title, x, _smoothed(y), 0))
        from_zero = name not in ("lr", "grad_norm")
        if drawing := svg.chart(curves, "step", unit, f"{title} by step", from_zero):
            parts.append(f"<h3>{title}</h3>{drawing}")
    return _section("Course of the run", "".join(parts))


def _samples(run: _Run) -> str:
    """Texts that the model wrote, the last one first."""
    try:
        with durable.open_regular(run.path / SAMPLES) as file:
            content = file.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    samples = []
    for part in ("\n" + content).split("\n--- step ")[1:]:
        step, _, text = part.partition("\n")
        samples.append((step.strip(), text.strip("\n")))
    if not samples:
        return ""
    step, text = samples[-1]
    body = f"<p>After step {_text(step)}:</p><pre>{_text(text)}</pre>"
    earlier = _spread(samples[:-1], SAMPLES_SHOWN)
    if earlier:
        texts = "".join(
            f"<p>After step {_text(step)}:</p><pre>{_text(text)}</pre>"
            for step, text in reversed(earlier)
        )
        count = "1 earlier one" if len(earlier) == 1 else f"{len(earlier)} earlier ones"
        body += f"<details><summary>{count}</summary>{texts}</details>"
    return _section("What the model writes", body)


def _profile(run: _Run) -> str:
    """Where the time went, if the run was profiled: each operation without those inside it."""
    try:
        with durable.open_regular(run.path / PROFILE) as file:
            rows = json.loads(file.read())["rows"]
        own: dict[str, float] = {}
        for row in rows:
            own[row["path"][-1]] = own.get(row["path"][-1], 0.0) + row["own"] / 1e9
    except (OSError, ValueError, KeyError, TypeError, RecursionError, IndexError):
        return ""
    whole = sum(own.values())
    if not whole > 0:
        return ""
    bars = "".join(
        f'<div class="bar"><span>{_text(name)}</span><i style="width:{100 * part / whole:.2f}%">'
        f"</i><span>{part:.2f} s, {part / whole:.0%}</span></div>"
        for name, part in sorted(own.items(), key=lambda item: -item[1])
        if part >= LEAST * whole
    )
    return _section(
        "Where the time went", f"<p>{whole:.1f} seconds of training were measured.</p>{bars}"
    )


def _health(run: _Run) -> str:
    """Problems: findings, rollbacks, warnings, failures."""
    problems: list[str] = []
    checks = 0
    for row in run.rows:
        step = f"Step {row['step']:,}: "
        if isinstance(findings := row.get("findings"), list):
            checks += 1
            problems += [
                step + f"{finding.get('name')}: {finding.get('message')}"
                for finding in findings
                if isinstance(finding, dict)
            ]
        if _is_number(row.get("spike_step")):
            problems.append(
                step + f"the loss of step {row['spike_step']:,} was a spike; the run went back to "
                "this step, without that batch"
            )
        problems += [step + str(row[name]) for name in ("warning", "failure") if name in row]
    if not problems:
        count = "1 check" if checks == 1 else f"{checks} checks"
        return _section("Health", f"<p>{count}, no problems.</p>") if checks else ""
    shown = _spread(problems, SAMPLES_SHOWN)
    lines = "".join(f'<p class="warning">{_text(problem)}</p>' for problem in shown)
    left_out = len(problems) - len(shown)
    note = f'<p class="quiet">{left_out} more in metrics.jsonl.</p>' if left_out else ""
    return _section("Health", lines + note)


def _use(run: _Run) -> str:
    name = run.path.resolve().name
    lines = [
        f'smallmind generate {name} --prompt "..."',
        f"smallmind evaluate {name}",
        f"smallmind train --resume {name} --steps {2 * run.settings.training.steps}",
        f"smallmind export {name} --to gguf {name}.gguf",
        "",
        f'model, tokenizer = smallmind.load("{name}")  # in Python',
    ]
    body = "<p>In the directory that holds the run:</p>"
    return _section("How to use it", f"{body}<pre>{_text(chr(10).join(lines))}</pre>")


def _settings(run: _Run) -> str:
    """What was chosen, then everything."""
    chosen, everything = [], []
    for name, kind in SECTIONS.items():
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        for field, value in dataclasses.asdict(getattr(run.settings, name)).items():
            everything.append((f"{name}.{field}", value))
            if value != defaults[field]:
                chosen.append((f"{name}.{field}", value))
    versions = [
        (name, run.saved[name])
        for name in ("smallmind", "python", "numpy", "text_sha256")
        if name in run.saved
    ]
    return (
        _section("Settings that differ from the defaults", _table(chosen))
        + f"<details><summary>All settings</summary>{_table(everything)}</details>"
        + _section("Made with", _table(versions))
    )


def _column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps with a value in a column, and the values."""
    found = [(row["step"], row[name]) for row in rows if _is_number(row.get(name))]
    return [step for step, _ in found], [value for _, value in found]


def _smoothed(values: list[float]) -> list[float]:
    return Curve(range(len(values)), values, values).smoothed(len(values) // 100).values


def _parameters(run: _Run) -> int:
    return declare_parameters(run.settings.model).count


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < svg.LARGEST  # and not NaN


def _spread(items: list[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _legend(curves: Iterable[svg.Line]) -> str:
    keys = "".join(
        f'<span><span class="key c{curve.colour}"></span>{_text(curve.name)}</span>'
        for curve in curves
        if not curve.faint and curve.x
    )
    return f'<div class="legend">{keys}</div>'


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    cells = "".join(
        f'<tr><td>{_text(name)}</td><td class="value">{_text(value)}</td></tr>'
        for name, value in rows
    )
    return f'<div class="scroll"><table>{cells}</table></div>' if cells else "<p>None.</p>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _text(value: Any) -> str:
    return html.escape(str(value))
