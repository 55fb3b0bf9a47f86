"""Several runs on one page of HTML: their curves, what differs, mean and spread over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

from smallmind.charts.figure import Figure, Line, Panel
from smallmind.charts.svg import N_COLOURS
from smallmind.checks import InputError
from smallmind.console.activity import duration
from smallmind.console.table import escape
from smallmind.runs.sweep import is_sweep, label, shown
from smallmind.views.comparison import (
    COMPARED,
    TEXT,
    compare_tasks,
    compared_field,
    differences,
    kinds,
    settings_of,
    varied_in,
)
from smallmind.views.page import (
    large_chart,
    page,
    section,
    settings_table,
    small_charts,
    table,
    warnings,
)
from smallmind.views.run_view import RunView, State, finite, open_view

FIELDS = (*COMPARED, "tokens_per_second")
NAMES = {"val_loss": "held-out loss", "bits_per_byte": "held-out loss", "loss": "training loss"}
UNITS = {"val_loss": "nats per token", "bits_per_byte": "bits per byte", "loss": "nats per token"}
FINAL = {"val_loss": "final_loss", "bits_per_byte": "final_bits_per_byte", "loss": None}
MAX_VALUE = 40  # characters of one in a table
MAX_COLUMNS = 5  # of settings, in a table of runs
MAX_NOTES = 10
MIN_EVALUATIONS = 3  # that make a curve


class RunGroup(NamedTuple):
    """Runs that differ in nothing but their seed."""

    settings: dict[str, Any]  # of those that differ between the groups
    runs: list[RunView]
    losses: list[float]  # of the runs that have one

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses) if self.losses else math.inf


def report_of_runs(paths: Sequence[str | PathLike[str]]) -> str:
    """The directories of runs -> the page. InputError unless this version can read all of them."""
    views = [open_view(path, FIELDS) for path in paths]
    for view in views:
        if view.settings is None:
            raise InputError(f"{view.path} cannot be shown: {view.problem}")
    differing = differences(views)
    # One that failed before its first evaluation says nothing about the others.
    sound = [view for view in views if view.state != State.FAILED]
    field = compared_field(sound or views, differing)
    varied = varied_in(differing)
    groups = _groups(views, differing, varied, field)
    parts = (
        f"<h1>Comparison of {len(views)} runs</h1>",
        f'<p class="quiet">{escape(_names(views))}</p>',
        _warnings(differing, field),
        _curves(groups, varied, field),
        _means(groups, varied, field),
        _tasks(views, differing),
        _differing(groups, varied),
        _course(groups),
        _runs(groups, varied, field),
        _unfinished(views),
        _common(views, differing),
    )
    return page(f"Comparison of {len(views)} runs", parts)


def _groups(
    views: Sequence[RunView], differing: Mapping[str, list[Any]], varied: Sequence[str], field: str
) -> list[RunGroup]:
    """Returns the runs by their settings, the lowest mean loss first."""
    groups = []
    for kind in kinds(len(views), differing):
        settings = {name: differing[name][kind[0]] for name in varied}
        runs = [views[i] for i in kind]
        losses = [loss for view in runs if math.isfinite(loss := loss_of(view, field))]
        groups.append(RunGroup(settings, runs, losses))
    return sorted(groups, key=lambda group: group.mean)


def loss_of(view: RunView, field: str) -> float:
    """-> the loss by which a run is compared: on the whole held-out text, once it has ended.

    Before that the lowest of its evaluations, or the last one of training; NaN without any, and if
    it has failed.
    """
    final = finite((view.final or {}).get(FINAL[field] or ""))
    if final is not None:
        return final
    curve = view.curves[field].finite()
    if view.state == State.FAILED:
        return math.nan
    if field == "loss":
        return curve.smoothed().values[-1] if len(curve) else math.nan
    return min(curve.values, default=math.nan)


def _compared(groups: Sequence[RunGroup], field: str) -> str:
    """Returns the name of the losses that `loss_of` finds: final ones if any run has ended."""
    if FINAL[field] is None:
        return NAMES[field]
    has_ended = any(view.final for group in groups for view in group.runs)
    return f"{'final' if has_ended else 'best'} {NAMES[field]}"


def _names(views: Sequence[RunView]) -> str:
    """Returns the names of a few runs, or of the sweep that they are from."""
    folders = {view.path.resolve().parent for view in views}
    if len(folders) == 1 and is_sweep(folder := folders.pop()):
        return f"Sweep {folder.name}"
    return ", ".join(view.name for view in views[:3]) + ", ..." * (len(views) > 3)


def _warnings(differing: Mapping[str, Any], field: str) -> str:
    """Notes what makes losses hard to compare."""
    notes = []
    if TEXT in differing:
        notes.append("The texts differ: a lower loss may only mean an easier text.")
    if field == "loss":
        notes.append("Not all of these runs were evaluated: they are compared in training.")
    return warnings(notes)


def _unfinished(views: Sequence[RunView]) -> str:
    """Returns the runs that have not ended, and why."""
    notes = []
    for view in views:
        if (state := view.state) not in (State.FINISHED, State.IMPORTED):
            reason = f": {view.failure}" if state == State.FAILED and view.failure else ""
            notes.append(f"{view.name}: {state.value}{reason}")
    more = len(notes) - MAX_NOTES
    left_out = f'<p class="quiet">{more} more: see the table.</p>' if more > 0 else ""
    return section("Unfinished runs", warnings(notes[:MAX_NOTES]) + left_out)


def _name(group: RunGroup, varied: Sequence[str]) -> str:
    """Returns a short name of a group for a legend."""
    if not varied:
        return group.runs[0].name if len(group.runs) == 1 else f"{len(group.runs)} runs"
    count = f" ({len(group.runs)} runs)" if len(group.runs) > 1 else ""
    settings = {name: shown(value)[:MAX_VALUE] for name, value in group.settings.items()}
    is_short = len(varied) <= MAX_COLUMNS
    return f"{label(settings, varied) if is_short else group.runs[0].name}{count}"


def _curves(groups: Sequence[RunGroup], varied: Sequence[str], field: str) -> str:
    """Returns the losses of the groups that are best, each in its colour."""
    drawn = groups[:N_COLOURS]
    counts = [len(x.curves[field].finite()) for group in drawn for x in group.runs if group.losses]
    if field == "val_loss" and min(counts, default=0) < MIN_EVALUATIONS:
        field = "loss"
    lines = []
    for colour, group in enumerate(drawn):
        for view in group.runs:
            curve = view.curves[field].finite()
            curve = curve.smoothed() if field == "loss" else curve
            lines.append(Line(_name(group, varied), curve, colour))
    title = f"{NAMES[field]}, smoothed" if field == "loss" else NAMES[field]
    panel = Panel(title, UNITS[field], lines)
    chart = large_chart(Figure("Losses of the runs by step", [panel]))
    note = ""
    if len(groups) > N_COLOURS:
        note = f'<p class="quiet">Only the {N_COLOURS} best of {len(groups)} are drawn.</p>'
    return section("Loss", chart and chart + note)


def _means(groups: Sequence[RunGroup], varied: Sequence[str], field: str) -> str:
    """Sorts the groups by their mean loss; only if runs with other seeds are together."""
    if not any(len(group.runs) > 1 for group in groups):
        return ""
    rows, varied = [], varied if len(varied) <= MAX_COLUMNS else []
    for place, group in enumerate(groups, 1):
        losses = group.losses
        spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        ends = [f"{min(losses):.4f}", f"{max(losses):.4f}"] if losses else ["", ""]
        mean = f"{group.mean:.4f}" if losses else ""
        settings = [shown(group.settings[name])[:MAX_VALUE] for name in varied]
        count = f"{len(losses)} of {len(group.runs)}"
        rows.append([f"{place}", *settings, mean, spread, *ends, count])
    heads = ["place", *varied, "mean", "spread", "lowest", "highest", "runs"]
    note = (
        f"<p>{_compared(groups, field).capitalize()} in {UNITS[field]}, the lowest mean first. "
        "The spread is the standard deviation over runs that differ only in their seed.</p>"
    )
    return section("Mean and spread over seeds", note + table(rows, heads, best=0))


def _tasks(views: Sequence[RunView], differing: Mapping[str, list[Any]]) -> str:
    """-> the results of tasks that several runs have, and the differences beyond chance."""
    body = ""
    for compared in compare_tasks(views, differing):
        rows = [
            [view.name, share.shown()]
            for view, share in zip(views, compared.shares, strict=True)
            if share
        ]
        body += f"<p>{escape(compared.task)}</p>"
        body += table(rows, ["run", f"{compared.measure}, %"])
        for change in compared.changes:
            kinds_of = (change.after, change.before)
            after, before = (", ".join(views[i].name for i in kind) for kind in kinds_of)
            told = f"{after} vs. {before}: {change.interval.told()}."
            body += f"<p>{escape(told)}</p>"
    note = (
        "<p>95% intervals are in parentheses. Groups of runs are compared item by item; "
        "differences within the spread over seeds are not reported as such.</p>"
    )
    return section("Tasks", body and note + body)


def _differing(groups: Sequence[RunGroup], varied: Sequence[str]) -> str:
    """Returns the settings that differ, if they are too many for columns of other tables."""
    if len(varied) <= MAX_COLUMNS:
        return ""
    if len(groups) > N_COLOURS:
        rows = [(group.runs[0].name, label(group.settings, varied)) for group in groups]
        return section("Settings that differ", settings_table(rows))
    heads = ["setting", *(group.runs[0].name[:MAX_VALUE] for group in groups)]
    cells = [
        [name, *(shown(group.settings[name])[:MAX_VALUE] for group in groups)] for name in varied
    ]
    return section("Settings that differ", table(cells, heads))


def _course(groups: Sequence[RunGroup]) -> str:
    """Returns the learning rate and the gradient norm of the groups that are drawn."""
    panels = [("Learning rate", "lr", True), ("Gradient norm, smoothed", "grad_norm", False)]
    charts = []
    for title, name, from_zero in panels:
        lines = [
            Line("", view.curves[name].finite().smoothed(None if name != "lr" else 1), colour)
            for colour, group in enumerate(groups[:N_COLOURS])
            for view in group.runs
        ]
        charts.append(Figure(f"{title} by step", [Panel(title, "", lines, from_zero)]))
    return section("Training curves", small_charts(charts))


def _runs(groups: Sequence[RunGroup], varied: Sequence[str], field: str) -> str:
    """Returns a row for each run, the lowest loss first."""
    rows, varied = [], varied if len(varied) <= MAX_COLUMNS else []
    for group in groups:
        for view in group.runs:
            loss, rates = loss_of(view, field), sorted(view.curves["tokens_per_second"].values)
            seed = view.settings.run.seed if view.settings else ""
            settings = [shown(group.settings[name])[:MAX_VALUE] for name in varied]
            row = [view.name, *settings, str(seed), f"{loss:.4f}" if math.isfinite(loss) else ""]
            row += [f"{view.step:,}", duration(view.seconds), view.state.value]
            row.insert(-1, f"{rates[len(rates) // 2]:,.0f}" if rates else "")
            rows.append((loss if math.isfinite(loss) else math.inf, row))
    rows.sort(key=lambda pair: pair[0])
    name = _compared(groups, field)
    heads = ["run", *varied, "seed", name, "steps", "time", "tokens/s", "state"]
    note = f"Losses in {UNITS[field]}, training times in minutes:seconds."
    if name.startswith("final") and not all(x.final for group in groups for x in group.runs):
        note += f" Unfinished runs show their best {NAMES[field]} so far."
    note = f"<p>{note}</p>"
    return section("Runs", note + table([row for _, row in rows], heads, best=0))


def _common(views: Sequence[RunView], differing: Mapping[str, Any]) -> str:
    """Returns the settings that all of them have."""
    common = [(x, value) for x, value in settings_of(views[0]).items() if x not in differing]
    body = f"<details><summary>Settings in common</summary>{settings_table(common)}</details>"
    return body if common else ""
