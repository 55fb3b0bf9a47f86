"""A run on one page of HTML: sample, loss, how to use it, and then everything else."""

import itertools
import math
import shlex
from collections.abc import Sequence
from os import PathLike
from typing import Any

from smallmind.charts.curve import Curve
from smallmind.charts.figure import Figure, Line, Panel, losses_of, noisy
from smallmind.charts.roofline import Point, roofline_chart
from smallmind.checks import InputError, count_of, from_json, number, whole
from smallmind.console.activity import duration
from smallmind.console.table import Table, escape
from smallmind.files import durable
from smallmind.kernels.cases import intensity
from smallmind.kernels.description import KERNELS
from smallmind.losses.reward_settings import RewardsConfig
from smallmind.runs.files import PROFILE, TASKS
from smallmind.runs.precisions import PrecisionTable
from smallmind.settings.config import Precision
from smallmind.settings.presets import RECIPES
from smallmind.settings.rules import Choices
from smallmind.settings.settings import LOSS_RECORDS, SECTIONS, Settings, to_saved
from smallmind.settings.sources import FOLLOWING
from smallmind.tasks.results import read_results
from smallmind.training.energy import energy_text
from smallmind.training.operations import usage_text
from smallmind.views.page import (
    figures,
    large_chart,
    page,
    section,
    settings_table,
    small_charts,
    table,
    warnings,
)
from smallmind.views.run_view import PLOTTED, RunView, State, open_view

COPIES = "copy_bytes_per_second"  # in a profile
FIELDS = (*PLOTTED, *RewardsConfig.records, "tokens_per_second", "memory", "peak_memory")
MAX_EVALUATIONS = 12  # in the table
MAX_SAMPLES = 40
OF_THIS_RUN = ("text", "out", *FOLLOWING)  # no recipe has these settings
MIN_SHARE = 0.005  # of the time, below which an operation is left out


def report(path: str | PathLike[str]) -> str:
    """The directory of a run -> the page. InputError unless this version can read the run."""
    view = open_view(path, FIELDS)
    if view.settings is None:
        raise InputError(f"{path} cannot be shown: {view.problem}")
    parts = (
        _head(view),
        figures(_cards(view)),
        _samples(view),
        _answers(view),
        _loss(view),
        _use(view),
        _course(view),
        _evaluations(view),
        _tasks(view),
        _precisions(view),
        _profile(view),
        _health(view),
        _settings(view),
    )
    return page(f"{view.path.resolve().name}: training report", parts)


def _head(view: RunView) -> str:
    assert view.settings
    model, training = view.settings.model, view.settings.training
    tokens = model.block_size * view.settings.run.batch_size * training.grad_accum_steps
    parts = [model.norm, model.position, model.mlp]
    count = "" if view.parameters is None else f" of {view.parameters:,} parameters"
    trained = f", trained on <b>{escape(view.text)}</b>" if view.text else ""
    length = f"{count_of(training.steps, 'step')} of {count_of(tokens, 'token')}"
    steps = (
        f" {length} with {escape(training.optimizer)}, at a "
        f"learning rate of {training.learning_rate:g}."
    )
    return (
        f"<h1>{escape(view.path.resolve().name)}</h1>"
        f'<p class="quiet">{view.state.value.capitalize()}</p>'
        f"<p>A language model{count}{trained}: {count_of(model.n_layer, 'layer')} of "
        f"{model.n_embd} channels, {count_of(model.n_head, 'head')}, windows of "
        f"{count_of(model.block_size, 'token')}, a vocabulary of "
        f"{model.vocab_size:,}; parts: {escape(', '.join(parts))}.{steps * bool(view.steps)}"
        "</p>"
    )


def _cards(view: RunView) -> list[tuple[str, str, str]]:
    """Returns the figures that people look for first: name, value, unit."""
    cards = []
    best, end = view.best or {}, view.final or {}
    if _is_rewarded(view):
        if _is_number(end.get("final_loss")):
            unit = "per held-out question"
            cards.append(("Final reward", f"{-end['final_loss']:.4f}", unit))
        best = end = {}
    if _is_number(end.get("final_loss")):
        unit = "nats per token, on the whole held-out text"
        cards.append(("Final held-out loss", f"{end['final_loss']:.4f}", unit))
    elif best:
        unit = f"nats per token, after step {best['step']:,}"
        cards.append(("Best held-out loss", f"{best['val_loss']:.4f}", unit))
    bits = end.get("final_bits_per_byte", best.get("bits_per_byte"))
    if _is_number(bits):
        cards.append(("Compression", f"{bits:.3f}", "bits/byte of held-out text"))
    if view.steps is not None:
        cards.append(("Length", f"{view.step:,}", f"of {count_of(view.steps, 'step')}"))
    if view.seconds:
        cards.append(("Time", *_time(view.seconds)))
    if rates := sorted(_curve(view, "tokens_per_second").values):
        cards.append(("Speed", f"{rates[len(rates) // 2]:,.0f}", "tokens/s"))
    if peaks := _curve(view, "peak_memory").values:
        cards.append(("Memory", f"{max(peaks) / 1e6:,.0f} MB", "peak of the process"))
    return cards


def _is_rewarded(view: RunView) -> bool:
    """Returns True for a run that learns by rewards: the higher, the better."""
    return view.settings is not None and bool(view.settings.rewards.reward)


def _time(seconds: float) -> tuple[str, str]:
    """Returns a time of training and its unit."""
    if seconds < 60:
        return f"{seconds:.1f} s", "of training"
    unit = "hours:minutes:seconds" if seconds >= 3600 else "minutes:seconds"
    return duration(seconds), f"{unit} of training"


def _loss(view: RunView) -> str:
    """Returns the losses from the untrained model on, or what answers earned."""
    if _is_rewarded(view):
        lines = noisy("sampled answers", _curve(view, "sampled_reward"))
        lines.append(Line("held-out questions", _curve(view, "reward"), dots=True))
        figure = Figure("Reward by step", [Panel("reward", "", lines)])
        return section("Reward", large_chart(figure))
    loss = _curve(view, "loss")
    chart = large_chart(losses_of(loss, _curve(view, "val_loss")))
    note = ""
    if chart and loss.steps[:1] == [1]:
        assert view.settings
        guess = math.log(view.settings.model.vocab_size)
        start = (
            f"Before training the loss was {loss.values[0]:.2f}; guessing among the "
            f"{view.settings.model.vocab_size:,} tokens of the vocabulary gives {guess:.2f}."
        )
        note = f'<p class="quiet">{start}</p>'
    return section("Loss", chart and chart + note)


def _evaluations(view: RunView) -> str:
    rows = [row for row in view.evaluations if _is_number(row.get("val_loss"))]
    if not rows:
        return ""
    best = min(rows, key=lambda row: row["val_loss"])
    chosen = {rows.index(best), *_spread(range(len(rows)), MAX_EVALUATIONS)}
    columns: dict[str, tuple[str, str]] = {
        "held-out loss": ("val_loss", ".4f"),
        "on training text": ("train_loss", ".4f"),
        "perplexity": ("perplexity", ",.3f"),
        "bits/char": ("bits_per_character", ".3f"),
        "bits/byte": ("bits_per_byte", ".3f"),
        "next-token accuracy": ("accuracy", ".1%"),
    }
    unit = "token"
    if any(_is_number(row.get("won")) for row in rows):  # answers were judged, not tokens
        columns, unit = dict(itertools.islice(columns.items(), 2)), "pair"
    if _is_rewarded(view):
        columns, unit = {}, ""
    for name, (title, kind) in LOSS_RECORDS.items():
        if any(_is_number(row.get(name)) for row in rows):
            columns[title] = (name, kind)
    shown = [row for i, row in enumerate(rows) if i in chosen]

    def cell(row: dict[str, Any], name: str, kind: str) -> str:
        return format(row[name], kind) if _is_number(row.get(name)) else ""

    cells = [
        [f"{row['step']:,}", *(cell(row, *column) for column in columns.values())] for row in shown
    ]
    note = _left_out(len(rows) - len(shown))
    found = table(cells, ("step", *columns), best=shown.index(best))
    about = f"<p>On held-out text, losses in nats per {unit}; the best is bold.</p>"
    if not unit:
        about = "<p>Reward of the likeliest answers to held-out questions; the best is bold.</p>"
    return section("Evaluations", f"{about}{found}{note}")


def _precisions(view: RunView) -> str:
    """Returns the losses with fewer bits per weight, if they have been measured."""
    if (found := PrecisionTable.read(view.path)) is None:
        return ""
    compared = found.table()
    about = (
        f"<p>{escape(found.model)}, on {found.losses[0].tokens:,} tokens of held-out text, in nats "
        "per token: the cost of fewer bits per weight.</p>"
    )
    return section(compared.title, about + table(compared.rows, compared.heads))


def _tasks(view: RunView) -> str:
    """Returns the results of the model on tasks, if it was evaluated on any."""
    body = ""
    for result in read_results(view.path / TASKS):
        found = result.table()
        rows = [*found.rows, found.footer] if found.footer else found.rows
        about = f"{result.title}, {result.model}, in {result.precision}."
        body += f"<p>{escape(' '.join([about, *result.notes]))}</p>"
        body += table(rows, found.heads, best=len(rows) - 1)
    note = "<p>Share of correct answers, with 95% intervals in parentheses.</p>"
    return section("Tasks", body and note + body)


def _course(view: RunView) -> str:
    """Returns the other curves over the steps."""
    rate, norm, speed, memory = (
        _curve(view, name) for name in ("lr", "grad_norm", "tokens_per_second", "memory")
    )
    megabytes = Curve(memory.steps, memory.seconds, [value / 1e6 for value in memory.values])
    panels = [
        Panel("Learning rate", "", [Line("", rate)], from_zero=True),
        Panel("Gradient norm", "before clipping", noisy("", norm)),
        Panel("Speed", "tokens/s", [Line("", speed)], from_zero=True),
        Panel("Process memory", "MB", [Line("", megabytes)], from_zero=True),
    ]
    charts = [Figure(f"{panel.label} by step", [panel]) for panel in panels]
    used = usage_text(view.usage)
    note = f"<p>{escape(used)}.</p>" if used else ""
    joules, seconds = (number(view.energy.get(x)) for x in ("joules", "energy_seconds"))
    if joules >= 0 and 0 < seconds < math.inf:
        note += f"<p>{energy_text(joules, seconds)} in the last session.</p>"
    return section("Training curves", small_charts(charts) + note)


def _samples(view: RunView) -> str:
    """Shows texts that the model wrote, the last one first."""
    samples = view.samples()
    if not samples:
        return ""
    last, *earlier = [
        f"<p>After step {step:,}:</p><pre>{escape(text)}</pre>"
        for step, text in (samples[-1], *reversed(_spread(samples[:-1], MAX_SAMPLES)))
    ]
    count = count_of(len(earlier), "earlier sample")
    details = f"<details><summary>{count}</summary>{''.join(earlier)}</details>"
    return section("What the model writes", last + details * bool(earlier))


def _answers(view: RunView) -> str:
    """Shows held-out questions, the expected answers, and those before and after training."""
    if not view.answers:
        return ""
    asked = [view.answers[0], view.answers[-1]] if len(view.answers) > 1 else view.answers
    found: list[dict[tuple[str, str], str]] = []
    for record in asked:
        rows = [row for row in record.get("answers", []) if _is_answer(row)]
        found.append({(question, wanted): answer for question, wanted, answer in rows})
    cells = [[*asked_for, *(each.get(asked_for, "") for each in found)] for asked_for in found[-1]]
    columns = ["question", "expected", *(f"after step {record['step']:,}" for record in asked)]
    shares = [
        f"{number(record.get('exact_match')):.0%} of {record.get('asked')} after step "
        f"{record['step']:,}"
        for record in asked
    ]
    about = f"<p>Exact answers: {escape(', '.join(shares))}.</p>"
    answers = Table("", cells, columns, "<" * len(columns)).html()
    return section("Held-out questions", f'{about}<div class="scroll answers">{answers}</div>')


def _is_answer(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 3 and all(isinstance(x, str) for x in row)


def _profile(view: RunView) -> str:
    """-> where the time went, if the run was profiled: each operation without those inside it."""
    try:
        with durable.open_regular(view.path / PROFILE) as file:
            profile = from_json(file.read())
        seconds: dict[str, float] = {}  # of each operation, without those inside it
        for row in profile["rows"]:
            name = row["path"][-1]
            seconds[name] = seconds.get(name, 0.0) + whole(row["own"]) / 1e9
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""
    total = sum(seconds.values())
    if not total > 0:
        return ""
    longest = max(seconds.values())
    bars = "".join(
        f'<div class="bar"><span>{escape(name).replace("_", "_<wbr>")}</span>'
        f'<i style="width:{100 * part / longest:.2f}%"></i>'
        f"<span>{part:.2f} s, {part / total:.0%}</span></div>"
        for name, part in sorted(seconds.items(), key=lambda item: -item[1])
        if part >= MIN_SHARE * total
    )
    measured = f"{total:.1f} seconds of training, counted in the innermost operation."
    body = f"<p>{measured}</p>{bars}{_roofline(view, profile)}{_heap(profile)}"
    return section("Where the time went", body)


def _roofline(view: RunView, profile: dict[str, Any]) -> str:
    """Draws the kernels below the machine's limits; "" for profiles of earlier versions."""
    try:
        peak = 1e9 * number(view.usage["ceiling_gflops"])
        copies = {f"{whole(int(n)) / 1e6:g} MB": number(x) for n, x in profile[COPIES].items()}
        work: dict[str, list[float]] = {}  # of each kernel: operations, bytes, seconds
        for row in profile["rows"]:
            name, nbytes = row["path"][-1], whole(row["nbytes"])
            if name in KERNELS and nbytes:
                operations = whole(row["operations"]) or intensity(name) * nbytes
                parts = operations, nbytes, whole(row["total"]) / 1e9
                work[name] = [x + y for x, y in zip(work.get(name, (0, 0, 0)), parts, strict=True)]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""
    points = [
        Point(name, operations / nbytes, operations / seconds, f"{seconds:.2f} s")
        for name, (operations, nbytes, seconds) in work.items()
        if seconds > 0
    ]
    kind = "bfloat16" if view.usage.get("ceiling_precision") == "bfloat16" else "float32"
    drawn = roofline_chart(points, {kind: peak}, copies)
    return drawn and (
        "<p>Each kernel by its operations per byte and per second. The lines are the limits of "
        f"this machine: copies from a cache and from memory, and multiply-adds.</p>{drawn}"
    )


def _heap(profile: dict[str, Any]) -> str:
    """Tells garbage collections and NumPy's memory; "" for profiles of earlier versions."""
    try:
        memory = profile["memory"]
        counts = " + ".join(f"{whole(count):,}" for count in memory["collections"])
        milliseconds = 1000 * number(memory["collecting"])
        resident, arrays = whole(memory["resident"]), memory["numpy"]
        if not 0 <= milliseconds < math.inf:
            return ""
        text = (
            f"Garbage collections by generation, youngest first: {counts}; they took "
            f"{milliseconds:.1f} ms. The process had {resident / 1e6:,.0f} MB at the end"
        )
        if arrays is not None:
            text += f", {whole(arrays) / 1e6:,.0f} MB of them in NumPy arrays"
    except (ValueError, KeyError, TypeError):
        return ""
    return f"<p>{text}.</p>"


def _health(view: RunView) -> str:
    """Lists problems: findings, rollbacks, warnings, failures."""
    problems, checks = view.notes, view.health_checks
    if not problems:
        count = count_of(checks, "check")
        return section("Health", f"<p>{count}, no problems.</p>") if checks else ""
    shown = _spread(problems, MAX_SAMPLES)
    return section("Health", warnings(shown) + _left_out(len(problems) - len(shown)))


def _use(view: RunView) -> str:
    assert view.settings
    name = view.path.resolve().name
    run, file = shlex.quote(name), shlex.quote(f"{name}.gguf")
    lines = [
        f"smallmind chat {run}" if view.answers else f'smallmind generate {run} --prompt "..."',
        f"smallmind evaluate {run}",
        f"smallmind export {run} --to gguf {file}",
        f"model, tokenizer = smallmind.load({name!r})  # in Python",
    ]
    if view.state == State.INTERRUPTED:
        lines.insert(0, f"smallmind train --resume {run}")
    elif view.state == State.RUNNING:
        lines.insert(0, f"smallmind watch {run}")
    elif view.state == State.FINISHED:
        lines.insert(2, f"smallmind train --resume {run} --steps {2 * (view.steps or 1)}")
    body = "<p>In the directory that contains the run:</p>"
    return section("How to use it", f"{body}<pre>{escape(chr(10).join(lines))}</pre>")


def _settings(view: RunView) -> str:
    """Returns the settings that differ from the nearest recipe, then all, both folded."""
    assert view.settings
    recipe, differing = _nearest_recipe(view.settings)
    everything = [
        (f"{name}.{field}", value)
        for name in SECTIONS
        for field, value in to_saved(getattr(view.settings, name)).items()
    ]
    versions = [
        (name, view.saved[name])
        for name in ("smallmind", "python", "numpy", "text_sha256")
        if name in view.saved
    ]
    heads = ["setting", "this run", f"recipe {recipe}"]
    cells = [[name, *map(str, pair)] for name, pair in differing.items()]
    compared = f'<div class="settings several">{Table("", cells, heads, "<<<").html()}</div>'
    folds = (
        (f"{count_of(len(cells), 'difference')} from the recipe {recipe}", compared),
        ("All settings", settings_table(everything)),
        ("Versions", settings_table(versions)),
    )
    body = "".join(
        f"<details><summary>{title}</summary>{found}</details>" for title, found in folds if found
    )
    return section("Settings", body)


def _nearest_recipe(settings: Settings) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """-> the recipe that most settings follow, and the others: their values here and there."""
    own, found = settings.fields, {}
    for recipe in RECIPES:
        usual = Choices({}, recipe).settings().fields
        found[recipe] = {
            name: (value, usual[name])
            for name, value in own.items()
            if value != usual[name] and name not in OF_THIS_RUN and usual[name] != Precision.AUTO
        }
    return min(found.items(), key=lambda pair: len(pair[1]))


def _curve(view: RunView, name: str) -> Curve:
    return view.curves[name].finite()


def _left_out(count: int) -> str:
    return f'<p class="quiet">{count} more in metrics.jsonl.</p>' if count else ""


def _is_number(value: Any) -> bool:
    return math.isfinite(number(value))


def _spread(items: Sequence[Any], count: int) -> Sequence[Any]:
    """Returns at most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
