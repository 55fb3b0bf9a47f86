"""Reads metrics.jsonl as a table, however the run ended."""

import csv
import dataclasses
import io
import json
import math

import pytest

from smallmind.runs.metrics import read_metrics
from smallmind.training.records import EvaluationRecord, OverflowRecord, StepRecord
from smallmind.views.run_view import RunView
from tests.programs import refuses
from tests.runs.small import create

STEPS = [
    StepRecord(n, 4 / n, 1e-3, 0.3, 1e5 / 3, n / 100, 7.5, 12, "float16", 65536.0, 0.25, 8, 9)
    for n in (1, 10, 20)
]
EVALUATIONS = [
    EvaluationRecord(15, 2.5, 2.75, 15.6, 3.97, 3.96, 0.4),
    EvaluationRecord(20, 2.0, 2.25, 9.49, 3.25, 3.24, 0.5),
]
STEP_COLUMNS = [field.name for field in dataclasses.fields(StepRecord)]
EVALUATION_COLUMNS = [field.name for field in dataclasses.fields(EvaluationRecord)][1:]


def write(directory, records, end=""):
    lines = [json.dumps(dataclasses.asdict(record)) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines) + end, encoding="utf-8")


def read_csv(text):
    """The header of a CSV and its rows by step, without the cells that are empty."""
    reader = csv.DictReader(io.StringIO(text))
    rows = [
        {name: cell if name == "precision" else float(cell) for name, cell in row.items() if cell}
        for row in reader
    ]
    return reader.fieldnames, {row["step"]: row for row in rows}


def test_there_is_one_row_per_step_with_its_evaluation(tmp_path):
    write(tmp_path, [*STEPS[:2], EVALUATIONS[0], STEPS[2], EVALUATIONS[1]])
    table = read_metrics(tmp_path)
    header, rows = read_csv(table.to_csv())
    assert header == [*STEP_COLUMNS, *EVALUATION_COLUMNS]
    assert list(rows) == [1, 10, 15, 20] and table.unreadable == []
    for record in STEPS[:2]:
        assert rows[record.step] == dataclasses.asdict(record)  # every bit of every number
    assert rows[15] == dataclasses.asdict(EVALUATIONS[0])
    assert rows[20] == dataclasses.asdict(STEPS[2]) | dataclasses.asdict(EVALUATIONS[1])


def test_every_line_that_a_run_writes_says_its_kind_its_step_and_its_time(tmp_path, cli):
    run = create(tmp_path / "run")
    run.train()
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert {"step", "evaluation", "final"} <= {record["kind"] for record in records}
    assert all(list(record)[:2] == ["step", "kind"] for record in records)
    times = [record["elapsed_seconds"] for record in records]
    assert times == sorted(times) and times[0] > 0
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    curve = RunView(run.path).curves["val_loss"]
    assert curve.seconds == [record["elapsed_seconds"] for record in evaluations]
    table = run.metrics()
    assert table.columns[:2] == ["step", "loss"] and table.columns[-1] == "kind"
    kinds = {row["step"]: row["kind"] for row in table.rows}
    assert kinds[1] == "step" and kinds[3] == "step evaluation"
    assert kinds[6] == "step evaluation usage final"
    cli("export-metrics", run.path, "--out", tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().splitlines()[0].endswith(",kind")


def test_the_order_of_columns_does_not_depend_on_what_came_first(tmp_path):
    write(tmp_path, [OverflowRecord(1, 32768.0), EVALUATIONS[0], *STEPS[1:]])
    assert read_metrics(tmp_path).columns == [*STEP_COLUMNS, *EVALUATION_COLUMNS]


def test_the_header_is_the_first_line_and_numbers_stay_numbers(tmp_path):
    write(tmp_path, [dataclasses.replace(STEPS[0], grad_norm=0.1 + 0.2)])
    first, second, rest = read_metrics(tmp_path).to_csv().split("\n")
    columns = "step,loss,lr,grad_norm,tokens_per_second,elapsed_seconds,step_ms,windows,precision"
    assert first == f"{columns},loss_scale,clip_share,memory,peak_memory,gflops,waiting_share"
    assert rest == ""
    numbers = "1,4.0,0.001,0.30000000000000004,33333.333333333336,0.01,7.5,12"
    assert second == f"{numbers},float16,65536.0,0.25,8,9,0.0,0.0"


@pytest.mark.parametrize("end", ['{"step": 30, "loss": 1.2', '{"step": 3', "{", "1", '{"lr": 1}\n'])
def test_a_cut_line_is_skipped_and_reported(tmp_path, end):
    write(tmp_path, STEPS, end)
    table = read_metrics(tmp_path)
    assert [row["step"] for row in table.rows] == [1, 10, 20] and table.unreadable == [4]


def test_a_whole_line_without_a_newline_is_a_record(tmp_path):
    write(tmp_path, STEPS, '{"step": 30, "loss": 1.25}')
    table = read_metrics(tmp_path)
    assert table.rows[-1] == {"step": 30, "loss": 1.25} and table.unreadable == []


def test_damage_in_the_middle_costs_one_line(tmp_path):
    write(tmp_path, STEPS)
    lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\xff\x00", *lines[1:]]))
    table = read_metrics(tmp_path)
    assert len(table.rows) == 3 and table.unreadable == [2]


def test_repeated_steps_replace_the_earlier_ones(tmp_path):
    again = dataclasses.replace(STEPS[1], loss=9.0)
    write(tmp_path, [*STEPS, again, EVALUATIONS[0]])
    rows = read_metrics(tmp_path).rows
    assert [row["step"] for row in rows] == [1, 10, 15, 20] and rows[1]["loss"] == 9.0


def test_columns_of_other_versions_come_last(tmp_path):
    write(tmp_path, STEPS, '{"step": 30, "zeta": 1, "alpha": null}\n')
    table = read_metrics(tmp_path)
    assert table.columns == [*STEP_COLUMNS, "alpha", "zeta"]
    assert table.to_csv().endswith("\n30" + "," * len(STEP_COLUMNS) + ",1\n")


def test_a_loss_that_is_not_a_number_is_shown_as_nan(tmp_path):
    write(tmp_path, [dataclasses.replace(STEPS[0], loss=math.nan)])
    assert read_metrics(tmp_path).to_csv().split("\n")[1].startswith("1,nan,")


def test_a_directory_without_metrics_is_refused(tmp_path):
    refuses(r"is not a run: cannot read its metrics\.jsonl", read_metrics, tmp_path)
    write(tmp_path, [])
    refuses("has no records yet", read_metrics, tmp_path)


def test_findings_and_ratios_are_json_in_one_cell_each(tmp_path):
    finding = {"name": "head.weight", "problem": "zero", "message": "all gradients, all of them"}
    record = {"step": 1, "findings": [finding], "update_ratios": {"head.weight": 0.5}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (row,) = csv.DictReader(io.StringIO(read_metrics(tmp_path).to_csv()))
    assert json.loads(row["findings"]) == [finding]
    assert json.loads(row["update_ratios"]) == {"head.weight": 0.5}


def test_a_curve_has_the_finite_numbers_of_a_column(tmp_path):
    values = [3.0, "high", None, math.nan, math.inf, 10**400, [1], 2]
    records = [{"step": n, "loss": value} for n, value in enumerate(values, 1)]
    records[0]["elapsed_seconds"] = 1.5
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    table = read_metrics(tmp_path)
    curve = table.curve("loss")
    assert (curve.steps, curve.values, curve.seconds) == ([1, 8], [3.0, 2.0], [1.5, 1.5])
    assert table.losses_svg().startswith("<svg ") and len(table.curve("lr")) == 0
    assert repr(table) == "<MetricsTable of 8 steps: step, loss, elapsed_seconds>"


def test_metrics_without_losses_have_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "warning": "x"}\n')
    table = read_metrics(tmp_path)
    assert table._repr_svg_() is None and table.losses_svg() == ""
    assert repr(table).startswith("<MetricsTable of 1 step: ")
