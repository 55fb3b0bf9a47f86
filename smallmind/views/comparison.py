"""The differences between runs: their settings, and their losses at equal steps or equal times."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from smallmind.charts.curve import Curve
from smallmind.runs.files import TASKS
from smallmind.settings.config import NEUTRAL
from smallmind.settings.settings import SECTIONS, current_names
from smallmind.settings.sources import OF_TOKENIZER
from smallmind.tasks.results import Interval, difference, read_results
from smallmind.views.run_view import PLOTTED, RunView

COMPARED = (*PLOTTED, "bits_per_byte")  # the fields that a view of a compared run needs
TEXT = "text_sha256"  # what the text was, whatever its path is
BESIDES = (TEXT, "initial_sha256", "teacher_sha256", "smallmind")  # settings, in config.json
# Each run has its own, what a run learns does not depend on them, or the steps tell it.
NOT_COMPARED = ("out", "lengths", *NEUTRAL)
OF_TOKENS = ("tokenizer", "vocab_size", *OF_TOKENIZER)
MAX_ROWS = 6  # of a table of losses
SEED = "seed"
FOLLOWING = (TEXT, "text", "smallmind", "vocab_size")  # from other settings, or without a name


class Losses(NamedTuple):
    """Values at the same places of an axis.

    None where a run has no value: it had not begun, or not got there.
    """

    places: list[float]  # steps or seconds
    values: list[list[float | None]]  # a row for each place, a column for each run


class TaskChange(NamedTuple):
    """The difference on a task between runs of one kind and of another, by their numbers."""

    before: list[int]
    after: list[int]
    interval: Interval


class TaskComparison(NamedTuple):
    """The shares that runs have right by a measure, None without a result, and the changes."""

    task: str  # "Pairs of blimp.jsonl.gz", and what is compared if it is not alike
    measure: str
    shares: list[Interval | None]
    changes: list[TaskChange]


def settings_of(view: RunView) -> dict[str, Any]:
    """Returns the settings of a run by name; those that its version lacked as they were then."""
    # A newer version may have written sections that this one does not read.
    sections: Mapping[str, Any] = view.settings.to_dict() if view.settings else view.saved
    found: dict[str, Any] = {}
    for section in SECTIONS:
        fields = sections.get(section)
        found |= current_names(fields) if isinstance(fields, Mapping) else {}
    found |= {name: view.saved.get(name) for name in BESIDES}
    return {name: value for name, value in found.items() if name not in NOT_COMPARED}


def differences(runs: Sequence[RunView]) -> dict[str, list[Any]]:
    """Setting -> its values in the runs, where these differ; None where a run lacks it."""
    every = [settings_of(view) for view in runs]
    names = dict.fromkeys(name for settings in every for name in settings)
    values = {name: [settings.get(name) for settings in every] for name in names}
    return {name: row for name, row in values.items() if any(x != row[0] for x in row)}


def compared_field(runs: Sequence[RunView], differing: Mapping[str, Any]) -> str:
    """-> the measure to compare: bits per byte if tokens differ, held-out or training losses."""
    has_bits = all(len(run.curves["bits_per_byte"].finite()) for run in runs)
    if has_bits and any(name in differing for name in OF_TOKENS):
        return "bits_per_byte"
    return "val_loss" if all(len(run.curves["val_loss"].finite()) for run in runs) else "loss"


def compare(runs: Sequence[RunView], field: str, axis: str) -> Losses:
    """Returns a field of the runs at a few places that all of them have got to, if there are any.

    Between two points it is taken to be on a straight line. Losses of training are smoothed.
    """
    curves = [run.curves[field].finite() for run in runs]
    if field == "loss":
        curves = [curve.smoothed() for curve in curves]
    places = _places(curves, axis) if all(map(len, curves)) else []
    return Losses(places, [[curve.at(place, axis) for curve in curves] for place in places])


def lowest(runs: Sequence[RunView], field: str) -> list[tuple[float, int, float] | None]:
    """-> the lowest value of a field in each run, its step and its seconds; None without any."""
    curves = [run.curves[field].finite() for run in runs]
    points = [zip(curve.values, curve.steps, curve.seconds, strict=True) for curve in curves]
    return [min(each, default=None) for each in points]


def _places(curves: Sequence[Curve], axis: str) -> list[float]:
    """Spreads steps at which the run with the fewest points has some, or times, evenly."""
    first = max(float(curve.xs(axis)[0]) for curve in curves)
    last = min(float(curve.xs(axis)[-1]) for curve in curves)
    if first >= last:
        return [last] if first == last else []
    if axis == "time":
        return [first + (last - first) * i / (MAX_ROWS - 1) for i in range(MAX_ROWS)]
    steps = [float(step) for step in min(curves, key=len).steps if first <= step < last]
    steps.append(last)  # where the shortest ends
    every = math.ceil(len(steps) / MAX_ROWS)
    return steps[::-1][::every][::-1]


def varied_in(differing: Mapping[str, Any]) -> list[str]:
    """-> the settings that make runs of different kinds, as the text does, which has no name."""
    return [name for name in differing if name not in (SEED, *FOLLOWING)]


def kinds(count: int, differing: Mapping[str, Sequence[Any]]) -> list[list[int]]:
    """-> the numbers of runs that differ in nothing but their seed, those of each kind together."""
    found: dict[tuple[str, ...], list[int]] = {}
    names = [*varied_in(differing), *({TEXT} & differing.keys())]
    for i in range(count):
        found.setdefault(tuple(repr(differing[name][i]) for name in names), []).append(i)
    return list(found.values())


def compare_tasks(
    runs: Sequence[RunView], differing: Mapping[str, Sequence[Any]]
) -> list[TaskComparison]:
    """Returns the results that two runs or more have on the same items.

    Changes are those from the first kind of runs to each other, or if all are of one kind, from the
    first run to each other.
    """
    every = [
        {(x.task, x.sha256, x.measures): x for x in read_results(v.path / TASKS)} for v in runs
    ]
    alike = kinds(len(runs), differing)
    alike = alike if len(alike) > 1 else [[i] for i in range(len(runs))]
    found = []
    for key in dict.fromkeys(key for results in every for key in results):
        results = [each.get(key) for each in every]
        groups = [result.all if result else None for result in results]
        counts = [group.count for group in groups if group]
        if len(counts) < 2 or len(set(counts)) > 1:
            continue
        first, *others = filter(None, ([i for i in kind if groups[i]] for kind in alike))
        known = [result for result in results if result]
        title = known[0].title
        if len({(x.model.partition(",")[0], x.precision) for x in known}) > 1:
            title += f": {'; '.join(f'{x.model}, {x.precision}' for x in known)}"
        for number, measure in enumerate(key[2]):
            verdicts = [group.verdicts[number] if group else "" for group in groups]
            before = [verdicts[i] for i in first]
            changes = [
                TaskChange(first, kind, difference(before, [verdicts[i] for i in kind]))
                for kind in others
            ]
            shares = [group.intervals[number] if group else None for group in groups]
            found.append(TaskComparison(title, measure, shares, changes))
    return found
