"""The results of a sweep, as its runs are on disk now: each run, and the mean over its seeds."""

import csv
import io
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smallmind.files import durable
from smallmind.runs.sweep import PlannedRun, SweepPlan
from smallmind.settings.sources import OF_TOKENIZER
from smallmind.views.run_view import RunView, State, finite

CSV, JSON = "results.csv", "results.json"
FORMAT = 1  # of the latter
LOG = ".log"  # behind the name of a run: what it printed
LOG_END_BYTES = 10_000  # of a log, where an error is
ERROR = re.compile(r"^smallmind[^:\n]*: (?:error: )?(?!warning: )(.+)$", re.MULTILINE)
CHANGES_TOKENS = {"tokenizer", "init_from", "recipe", "config", "text_separator", *OF_TOKENIZER}
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}


class Result(NamedTuple):
    """A run of a sweep so far. Losses are those on the whole held-out text, once it has ended."""

    name: str
    settings: dict[str, Any]
    state: str  # of the run, or "waiting"
    step: int
    steps: int | None
    seconds: float  # of training
    loss: float | None  # nats per token
    bits_per_byte: float | None
    best_loss: float | None  # the lowest of its evaluations
    text: str | None  # the digest of its text
    error: str | None

    @property
    def is_over(self) -> bool:
        """True if training it again would not give another result."""
        return self.state in (State.FINISHED, State.FAILED)


class SweepGroup(NamedTuple):
    """The runs that differ by their seed only, and the measure by which they are compared."""

    settings: dict[str, Any]
    results: list[Result]
    values: list[float]  # of the runs that have ended

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; None if no run has ended."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds; None for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def seconds(self) -> float:
        """The mean time of training of the runs that have ended, or of all."""
        ended = [each.seconds for each in self.results if each.state == State.FINISHED]
        return statistics.fmean(ended or [each.seconds for each in self.results])


def result_of(folder: Path, run: PlannedRun) -> Result:
    """Returns the result of a run so far; only reads its files."""
    view = RunView(folder / run.name, fields=())
    final, best = view.final or {}, view.best or {}
    state = str(view.state) if view.is_run else "waiting"
    loss, bits = (
        finite(final.get(f"final_{name}")) if state == State.FINISHED else None
        for name in ("loss", "bits_per_byte")
    )
    error = view.failure if state == State.FAILED else None
    if error is None and state in (State.INTERRUPTED, "waiting"):
        error = _error_of(folder / f"{run.name}{LOG}")
    elif state == State.FINISHED and loss is None:
        error = "its held-out loss is not finite"
    return Result(
        run.name,
        run.settings,
        state,
        view.step,
        view.steps,
        view.seconds,
        loss,
        bits,
        finite(best.get("val_loss")),
        view.saved.get("text_sha256"),
        error,
    )


def measure_of(plan: SweepPlan) -> str:
    """Returns the field by which runs are compared: bits per byte if their tokens may differ."""
    return "bits_per_byte" if CHANGES_TOKENS.intersection(plan.varied) else "loss"


def groups_of(plan: SweepPlan, results: Sequence[Result]) -> list[SweepGroup]:
    """-> the results in groups, sorted by the mean of the measure; groups without any come last."""
    measure = measure_of(plan)
    found: dict[tuple[tuple[str, Any], ...], SweepGroup] = {}
    varied = [name for name in plan.varied if name != "seed"]
    for result in results:
        settings = {name: result.settings.get(name) for name in varied}
        group = found.setdefault(tuple(settings.items()), SweepGroup(settings, [], []))
        group.results.append(result)
        if (value := getattr(result, measure)) is not None:
            group.values.append(value)
    return sorted(found.values(), key=lambda group: (group.mean is None, group.mean or 0.0))


def save(folder: Path, plan: SweepPlan, results: Sequence[Result]) -> None:
    """Writes a CSV table with a row for each run, and a JSON file with the groups too."""
    measure, varied = measure_of(plan), plan.varied
    columns = ("state", "step", "steps", "seconds", "loss", "bits_per_byte", "best_loss", "error")
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["name", *varied, *columns])
    for result in results:
        settings = [result.settings.get(name) for name in varied]
        writer.writerow([result.name, *settings, *(getattr(result, name) for name in columns)])
    groups = [
        {
            "settings": group.settings,
            "mean": group.mean,
            "standard_deviation": group.spread,
            "lowest": min(group.values, default=None),
            "highest": max(group.values, default=None),
            "ended": len(group.values),
            "runs": [result.name for result in group.results],
        }
        for group in groups_of(plan, results)
    ]
    whole = {"format": FORMAT, "measure": measure, "unit": UNITS[measure], "groups": groups}
    whole["runs"] = [result._asdict() for result in results]
    durable.write(folder / CSV, [lines.getvalue().encode("utf-8", "replace")])
    content = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
    durable.write(folder / JSON, [content.encode("utf-8", "replace")])


def _error_of(log: Path) -> str | None:
    """-> the error at the end of what a run printed; None if it ended in order, or was killed."""
    try:
        with durable.open_regular(log) as file:
            file.seek(max(0, file.seek(0, 2) - LOG_END_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().rsplit("\n", 1)
    except (OSError, ValueError):
        return None
    found = ERROR.match(lines[-1])
    return found[1] if found and found[1] != "interrupted" else None
