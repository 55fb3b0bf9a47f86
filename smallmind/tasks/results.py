"""Results of tasks: shares that are right, with intervals, and differences between models."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smallmind.checks import count_of, from_json, whole
from smallmind.console.table import Table, Tabular
from smallmind.files import durable

FORMAT = "smallmind tasks 1"
MAX_BYTES = 2**27
MAX_RESULTS = 100  # of a run: those of the last tasks
NORMAL_DEVIATIONS = 1.959964  # 95 % of a normal distribution is within this many deviations
# Student's distribution puts 95 % within these, with 1, 2, ... degrees of freedom.
STUDENT_DEVIATIONS = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
MAX_GROUP, SHORT_GROUP = 40, 24  # characters of a group in a table


class Interval(NamedTuple):
    """A value, and between which limits it is with 95 % confidence."""

    value: float
    low: float
    high: float

    @property
    def has_zero(self) -> bool:
        """True if the limits are on both sides of 0."""
        return self.low <= 0 <= self.high

    def shown(self) -> str:
        """Returns a share in percent: "46.2 (41.9 to 50.5)"."""
        value, low, high = (f"{100 * x:.1f}" for x in self)
        return f"{value} ({low} to {high})"

    def told(self) -> str:
        """Returns a difference of shares in words: none if it may as well be 0."""
        value, low, high = (f"{100 * x:+.1f}" for x in self)
        points = f"{value} points ({low} to {high})"
        return f"no difference: {points}" if self.has_zero else points


def wilson(right: int, count: int) -> Interval:
    """-> the share of right ones, with Wilson's interval (1927): within 0 and 1 for any counts."""
    if not count:
        return Interval(math.nan, 0.0, 1.0)
    share, z2 = right / count, NORMAL_DEVIATIONS**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = NORMAL_DEVIATIONS / (1 + z2 / count)
    half *= math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    # Rounding would exclude the share itself where all or none are right.
    return Interval(share, min(share, max(0.0, middle - half)), max(share, middle + half))


def paired(before: Sequence[float], after: Sequence[float]) -> Interval:
    """The shares of right ones among the same items, by item -> the difference of their means.

    Half an item is added to each of the two kinds of change, as Agresti and Min (2005) do: items
    that all come out equal are no proof that there is no difference.
    """
    count = len(before)
    changes = [b - a for a, b in zip(before, after, strict=True)]
    total = math.fsum(changes)
    squares = math.fsum(change * change for change in changes) + 1
    n = count + 2
    middle = total / n
    half = NORMAL_DEVIATIONS * math.sqrt(max(0.0, squares / n - middle**2) / n)
    difference = total / count if count else math.nan
    return Interval(difference, middle - half, middle + half)


def difference(before: Sequence[str], after: Sequence[str]) -> Interval:
    """The verdicts of runs of one kind and of another, on the same items -> what has changed.

    To what the choice of items explains it adds what seeds do: with several runs of a kind, their
    spread tells.
    """
    found = paired(_means(before), _means(after))
    kinds = [[_share(verdicts) for verdicts in kind] for kind in (before, after)]
    freedom = sum(len(shares) - 1 for shares in kinds)
    if not freedom:
        return found
    squares = math.fsum(
        (share - math.fsum(shares) / len(shares)) ** 2 for shares in kinds for share in shares
    )
    deviation = math.sqrt(squares / freedom * sum(1 / len(shares) for shares in kinds))
    seeds = deviation * (
        STUDENT_DEVIATIONS[freedom - 1] if freedom <= len(STUDENT_DEVIATIONS) else NORMAL_DEVIATIONS
    )
    middle = (found.low + found.high) / 2
    half = math.hypot((found.high - found.low) / 2, seeds)
    return Interval(found.value, middle - half, middle + half)


def _share(verdicts: str) -> float:
    return verdicts.count("1") / len(verdicts) if verdicts else math.nan


def _means(runs: Sequence[str]) -> list[float]:
    """Returns the share of runs that are right, by item."""
    return [column.count("1") / len(runs) for column in zip(*runs, strict=True)]


@dataclass(frozen=True)
class ItemGroup:
    """Items of one group: "1" or "0" for each that is right or not, by every measure."""

    name: str
    verdicts: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.verdicts[0])

    @property
    def intervals(self) -> list[Interval]:
        """The share that is right, by every measure."""
        return [wilson(verdicts.count("1"), len(verdicts)) for verdicts in self.verdicts]


@dataclass(frozen=True, repr=False)
class TaskResult(Tabular):
    """The results of a model on the items of a file, by group, in the order of the file.

    `sha256` is that of the items, so that results of several models can be compared item by item.
    `skipped` items have characters that the model does not know, `cut` ones were longer than its
    context.
    """

    task: str  # "pairs"
    item: str  # what one of them is called
    file: str
    sha256: str
    model: str  # "the final model, step 250"
    precision: str
    measures: tuple[str, ...]
    groups: tuple[ItemGroup, ...]
    skipped: int = 0
    cut: int = 0

    @property
    def all(self) -> ItemGroup:
        """All items as one group."""
        columns = zip(*(group.verdicts for group in self.groups), strict=True)
        return ItemGroup("all", tuple("".join(column) for column in columns))

    def table(self) -> Table:
        """Returns a line per group: its items, the percentage that is right, and its interval."""
        groups = [*(self.groups if len(self.groups) > 1 else ()), self.all]
        *rows, last = (
            [
                _shortened(group.name, MAX_GROUP if len(self.measures) == 1 else SHORT_GROUP),
                f"{group.count:,}",
                group.intervals[0].shown(),
                *(f"{100 * interval.value:.1f}" for interval in group.intervals[1:]),
            ]
            for group in groups
        )
        heads = ("group", f"{self.item}s", *(f"{measure}, %" for measure in self.measures))
        if not rows:
            return Table(self.title, [last], heads)
        return Table(self.title, rows, heads, footer=last)

    @property
    def title(self) -> str:
        return f"{self.task.capitalize()} of {self.file}"

    @property
    def notes(self) -> Iterator[str]:
        """Sentences about items that were not evaluated as they are."""
        if self.skipped:
            skipped = count_of(self.skipped, self.item)
            yield f"Skipped, with characters that the model has never seen: {skipped}."
        if self.cut:
            yield f"Truncated to the context: {count_of(self.cut, self.item)}."

    def as_json(self) -> dict[str, Any]:
        """Returns the counts and shares, for other programs."""

        def described(group: ItemGroup) -> dict[str, Any]:
            measures = {
                measure: {
                    "right": verdicts.count("1"),
                    "share": interval.value,
                    "low": interval.low,
                    "high": interval.high,
                }
                for measure, verdicts, interval in zip(
                    self.measures, group.verdicts, group.intervals, strict=True
                )
            }
            return {"count": group.count, "measures": measures}

        return {
            "task": self.task,
            "file": self.file,
            "sha256": self.sha256,
            "model": self.model,
            "precision": self.precision,
            "skipped": self.skipped,
            "cut": self.cut,
            **described(self.all),
            "groups": [{"group": group.name, **described(group)} for group in self.groups],
        }

    def keep(self, file: Path) -> None:
        """Keeps it in a file of a run, in place of what the run had on these items before."""
        others = [
            result
            for result in read_results(file)
            if (result.task, result.sha256) != (self.task, self.sha256)
        ]
        saved = [_saved(result) for result in [*others, self][-MAX_RESULTS:]]
        while len(content := json.dumps({"format": FORMAT, "results": saved}).encode()) > MAX_BYTES:
            del saved[0]  # or it could not be read again: one may have millions of verdicts
        durable.write(file, [content])


def read_results(file: Path) -> list[TaskResult]:
    """Returns the results that are in a file; none if there is none, or it is damaged."""
    try:
        saved: Any = from_json(durable.read(file, MAX_BYTES))
        if saved["format"] != FORMAT:
            return []
        return [_of_saved(result) for result in saved["results"][:MAX_RESULTS]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _saved(result: TaskResult) -> dict[str, Any]:
    groups = [{"name": group.name, "verdicts": group.verdicts} for group in result.groups]
    return {**vars(result), "groups": groups}


def _of_saved(saved: Mapping[str, Any]) -> TaskResult:
    """-> a result as `_saved` wrote it. KeyError, TypeError or ValueError for anything else."""
    names = ("task", "item", "file", "sha256", "model", "precision")
    words: dict[str, Any] = {name: _text(saved[name]) for name in names}
    measures = tuple(_text(measure) for measure in saved["measures"])
    groups = tuple(
        ItemGroup(_text(group["name"]), tuple(_verdicts(x) for x in group["verdicts"]))
        for group in saved["groups"]
    )
    for group in groups:
        if len(group.verdicts) != len(measures) or len(set(map(len, group.verdicts))) != 1:
            raise ValueError("the verdicts of a group differ in number")
    if not (measures and groups and sum(group.count for group in groups)):
        raise ValueError("there are no verdicts")
    words |= {name: whole(saved[name]) for name in ("skipped", "cut")}
    return TaskResult(**words, measures=measures, groups=groups)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is not a text")
    return value


def _verdicts(value: Any) -> str:
    if _text(value).strip("01"):
        raise ValueError("a verdict is neither 0 nor 1")
    return str(value)


def _shortened(name: str, longest: int) -> str:
    """Returns a name without its middle if it is too long: those of a file often begin alike."""
    end = longest // 3
    return name if len(name) <= longest else f"{name[: longest - end - 3]}...{name[-end:]}"
