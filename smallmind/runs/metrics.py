"""The metrics of a run as a table: a row per step, evaluations beside the step they followed."""

import csv
import dataclasses
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smallmind.charts.curve import Curve
from smallmind.charts.figure import losses_of
from smallmind.charts.svg import Svg, picture
from smallmind.checks import InputError, count_of, number
from smallmind.runs.files import METRICS
from smallmind.runs.metrics_file import MetricsFile, record_of
from smallmind.settings.settings import LOSS_RECORDS
from smallmind.training.records import Record

FIELDS = [field.name for kind in Record.__subclasses__() for field in dataclasses.fields(kind)]
first = FIELDS.index("of")
FIELDS[first : first + 3] = LOSS_RECORDS  # instead of the fields of a LossRecord
FIELDS.append("kind")  # last: the columns before it are those of earlier versions


@dataclass(frozen=True, repr=False)
class MetricsTable:
    """One row per step in ascending order, each a dictionary from column to value.

    A notebook shows its losses as a picture.

    `columns` are those with a value in some row, in the order of the records' fields. `unreadable`
    are the numbers, from 1, of the lines that are not records: usually the last line of a run that
    was killed or is being written.
    """

    columns: list[str]
    rows: list[dict[str, Any]]
    unreadable: list[int]

    def __repr__(self) -> str:
        count = count_of(len(self.rows), "step")
        return f"<MetricsTable of {count}: {', '.join(self.columns)}>"

    def _repr_svg_(self) -> str | None:
        return self.losses_svg() or None

    def curve(self, column: str) -> Curve:
        """Returns the numbers of a column that are finite, at their steps."""
        found, seconds = Curve(), 0.0
        for row in self.rows:
            if math.isfinite(elapsed := number(row.get("elapsed_seconds"))):
                seconds = elapsed
            if math.isfinite(value := number(row.get(column))):
                found.add(row["step"], seconds, value)
        return found

    def losses_svg(self) -> Svg:
        """Draws training and held-out loss; empty without any."""
        return picture(losses_of(self.curve("loss"), self.curve("val_loss")))

    def to_csv(self) -> str:
        """-> comma-separated text with a header; a cell is empty if its row has no value."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow({name: _cell(value) for name, value in row.items()})
        return text.getvalue()


def _cell(value: Any) -> Any:
    """Lists and dictionaries, such as findings, become JSON: one cell."""
    try:
        return json.dumps(value) if isinstance(value, list | dict) else value
    except RecursionError:
        return "(nested too deeply)"


def read_metrics(run: Path) -> MetricsTable:
    """Returns the metrics in the directory of a run. InputError if there are none.

    If two records of a step have the same column, the later one counts: a run that rolled back
    wrote these steps again. The kind of a row names those of all its records.
    """
    file = MetricsFile(run / METRICS)
    try:
        records = list(file.read())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{run} is not a run: cannot read its {METRICS}: {reason}") from None
    unreadable = file.unreadable
    if last := record_of(file.partial):  # which only lacks its line break
        records.append(last)
    elif file.partial:
        unreadable.append(file.lines + 1)
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        row = rows.setdefault(record["step"], {})
        kinds = [each["kind"] for each in (row, record) if isinstance(each.get("kind"), str)]
        row |= record
        if kinds:
            row["kind"] = " ".join(dict.fromkeys(" ".join(kinds).split()))
    if not rows:
        raise InputError(f"{run / METRICS} has no records yet; train the run first")
    in_order = [rows[step] for step in sorted(rows)]
    # Fields that only other versions write come last.
    names = dict.fromkeys([*FIELDS, *sorted(set().union(*in_order))])
    columns = [name for name in names if any(name in row for row in in_order)]
    return MetricsTable(columns, in_order, unreadable)
