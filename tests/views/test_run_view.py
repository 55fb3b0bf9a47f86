"""A run seen from outside: while it goes, after it was killed, damaged, old, or half created."""

import json
import math
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from smallmind.files.lock import RunLock
from smallmind.views.run_view import RunView, State, open_view
from tests.programs import refuses
from tests.runs.small import create
from tests.test_old_runs import OLD_RUNS
from tests.views.written import append, evaluation, final, finish, rollback, step, write


def everything(directory):
    """Every file below a directory with its contents and times."""
    paths = sorted(Path(directory).rglob("*"))
    return [
        (path, path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [Path(directory), *paths]
    ]


def test_a_real_run_from_its_creation_to_its_end(tmp_path):
    path = tmp_path / "run"
    run = create(path)
    view = RunView(path)
    assert view.state == State.RUNNING and view.step == 0 and view.best is None
    assert view.parameters == run.training.model.flat.count
    seen = [0]
    for record in run.steps():
        view.refresh()
        assert view.step == record.step and view.state == State.RUNNING
        seen.append(len(view.curves["loss"]))
    assert seen == sorted(seen)
    view.refresh()
    assert view.state == State.FINISHED and view.step == view.steps == 6
    assert view.curves["loss"].steps == list(range(1, 7))
    assert [x["step"] for x in view.evaluations] == [3, 6]
    assert view.final["final_loss"] == run.final.loss
    assert view.text == "text" and view.architecture == "Qwen3" and view.problem is None
    again = RunView(path)
    assert again.curves["loss"].values == view.curves["loss"].values


def test_a_run_that_was_left_is_interrupted_until_it_is_resumed(tmp_path):
    path = tmp_path / "run"
    run = create(path, log_every=5)
    steps = run.steps()
    assert next(steps).step == 1
    next(steps)
    steps.close()
    view = RunView(path)
    # A checkpoint was saved at a step that was not logged.
    assert view.state == State.INTERRUPTED and view.step == run.newest().step == 3
    run.resume()
    assert view.refresh() and view.state == State.FINISHED
    assert view.curves["loss"].steps == [1, 5, 6]


def test_looking_changes_nothing_and_needs_no_right_to_write(tmp_path):
    run = finish(write(tmp_path / "run", step(1), evaluation(1, 2.0), end='{"step": 2'), 1)
    (run / ".lock").write_text(f"{os.getpid()} {socket.gethostname()}")
    before = everything(tmp_path)
    run.chmod(0o555)
    try:
        view = open_view(run)
        view.refresh()
        assert view.state == State.RUNNING and repr(view) and view.parameters and view.best
    finally:
        run.chmod(0o755)
    assert everything(tmp_path) == before


def test_whoever_looks_keeps_no_run_from_starting(tmp_path):
    run = write(tmp_path / "run", step(1))
    view = RunView(run)
    with RunLock(run):
        assert view.state == State.RUNNING
    assert view.state == State.INTERRUPTED


def test_only_what_is_new_is_read(tmp_path):
    run = write(tmp_path / "run", step(1), step(2), end=json.dumps(step(3))[:20])
    view = RunView(run)
    assert view.curves["loss"].steps == [1, 2] and not view.refresh()
    append(run, end=json.dumps(step(3))[20:] + "\n")
    append(run, evaluation(3, 2.5), end='{"st')
    assert view.refresh() and view.curves["loss"].steps == [1, 2, 3]
    assert view.curves["val_loss"].values == [2.5] and view.curves["val_loss"].seconds == [0.3]
    assert not view.refresh()


def test_a_run_that_resumes_from_an_earlier_step_is_read_again(tmp_path):
    run = write(tmp_path / "run", *map(step, range(1, 9)), evaluation(8, 2.0))
    view = RunView(run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "other").write_text("".join(lines[:5]))
    os.replace(run / "other", run / "metrics.jsonl")
    append(run, step(6, loss=9.0))
    assert view.refresh()
    assert view.curves["loss"].steps == [1, 2, 3, 4, 5, 6] and view.curves["loss"].values[-1] == 9
    assert view.evaluations == [] and view.best is None and view.step == 6


def test_what_a_rollback_undid_is_gone(tmp_path):
    records = [*map(step, range(1, 9)), evaluation(4, 2.5), evaluation(8, 1.5), rollback(5, 9)]
    for fields in (("loss", "val_loss"), ()):
        run = write(tmp_path / f"run{len(fields)}", *records)
        view = RunView(run, fields)
        assert view.step == 5 and view.best["val_loss"] == 2.5
        append(run, step(6, loss=7.0), evaluation(6, 2.0))
        view.refresh()
        assert view.step == 6 and [x["step"] for x in view.evaluations] == [4, 6]
    view = RunView(tmp_path / "run2")
    assert view.curves["loss"].steps == [1, 2, 3, 4, 5, 6] and view.curves["loss"].values[-1] == 7.0


def test_an_evaluation_between_two_logged_steps_gets_a_time_between_theirs(tmp_path):
    view = RunView(write(tmp_path / "run", step(10), evaluation(15, 2.0), step(20)))
    assert view.curves["val_loss"].seconds == [pytest.approx(1.5)]


@pytest.mark.parametrize(
    ("records", "sampled", "extended", "state"),
    [
        ([], None, 0, State.INTERRUPTED),
        ([step(50)], None, 0, State.INTERRUPTED),
        ([step(100), final(100, 1.0)], 100, 0, State.FINISHED),
        ([step(100), final(100, 1.0)], None, 0, State.INTERRUPTED),  # killed during the sample
        ([step(40), {"step": 40, "best_step": 20, "best_loss": 1.0}], 40, 0, State.FINISHED),
        ([step(40), {"step": 40, "loss": 1.0, "target": 1.1}], 40, 0, State.FINISHED),
        # made longer after it had ended early
        ([step(40), {"step": 40, "best_step": 20, "best_loss": 1.0}], 40, 40, State.INTERRUPTED),
        ([step(60), {"step": 61, "failure": "diverged"}], None, 0, State.FAILED),
        ([step(40)], 20, 0, State.INTERRUPTED),
    ],
)
def test_what_has_become_of_a_run(tmp_path, records, sampled, extended, state):
    run = write(tmp_path / "run", *records, saved={"extended_after": extended})
    if sampled:
        finish(run, sampled)
    view = RunView(run, fields=())
    assert view.state == state and (view.failure == "diverged") == (state == State.FAILED)


def test_a_run_on_another_host_goes_as_long_as_it_writes(tmp_path):
    run = write(tmp_path / "run", step(1))
    (run / ".lock").write_text("7 elsewhere.example")
    assert RunView(run).state == State.RUNNING
    long_ago = time.time() - 3600
    os.utime(run / "metrics.jsonl", (long_ago, long_ago))
    assert RunView(run).state == State.INTERRUPTED


def test_a_run_that_is_being_created_is_one_already(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    with RunLock(path):
        (path / "metrics.jsonl").touch()
        view = open_view(path)
        assert view.state == State.RUNNING and view.settings is None and view.step == 0
        assert view.text is view.architecture is view.parameters is view.steps is None
        assert view.problem == "config.json cannot be read: No such file or directory"
        shutil.copy(write(tmp_path / "other") / "config.json", path)
        assert view.refresh() and view.problem is None and view.steps == 100


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "dropout"])
def test_runs_of_earlier_versions(name):
    view = open_view(OLD_RUNS / name)
    assert view.state == State.FINISHED and view.step == view.steps == 12 and view.text == "text"
    assert view.architecture == "GPT-2" and view.parameters == 2224
    assert view.curves["loss"].steps == [1, 2, 4, 6, 8, 10, 12]
    assert view.curves["val_loss"].steps == [4, 8, 12] and view.final is None
    assert "bits_per_byte" not in view.best


def test_a_run_of_a_newer_version_is_shown_as_far_as_it_is_known(tmp_path):
    run = write(tmp_path / "run", step(1), {"step": 1, "novelty": [1]}, saved={"format": 99})
    view = open_view(run)
    assert view.settings is None and "a newer smallmind wrote it" in view.problem
    assert view.curves["loss"].steps == [1] and view.parameters == 123_456


HOSTILE = [
    '{"step": 3, "loss": "high", "lr": null, "elapsed_seconds": [], "grad_norm": true}',
    '{"step": 4, "loss": NaN, "lr": Infinity, "elapsed_seconds": 1e999}',
    '{"step": 5, "val_loss": {}, "bits_per_byte": "x"}',
    '{"step": 6, "val_loss": NaN}',
    '{"step": 7, "loss": ' + "9" * 4000 + ', "lr": 1}',
    '{"step": -8, "spike_step": "x"}',
    '{"step": 9, "failure": null}',
    "[" * 100_000,
    "\x00\x01",
    '{"step": "ten"}',
    "null",
]


@pytest.mark.parametrize("fields", [(), ("loss", "val_loss", "lr", "grad_norm", "bits_per_byte")])
def test_no_line_of_the_metrics_is_too_strange(tmp_path, fields):
    run = write(tmp_path / "run", step(1), step(2), end="\n".join(HOSTILE) + "\n")
    append(run, step(10), evaluation(10, 2.0))
    view = open_view(run, fields)
    assert view.step == 10 and view.best["val_loss"] == 2.0 and repr(view)
    for curve in view.curves.values():
        assert len(curve) == len(curve.values) == len(curve.seconds)
        assert curve.finite().steps[-1] == 10


CONFIGS = [
    "",
    "{",
    "[]",
    "null",
    "1",
    "{}",
    "\xff",
    "[" * 100_000,
    '{"model": 1, "text_sha256": 2}',
    '{"text_sha256": "", "model": {"n_embd": -1}, "parameters": "x", "extended_after": "y"}',
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_that_cannot_be_read_is_a_problem_not_an_error(tmp_path, config):
    run = write(tmp_path / "run", step(1))
    (run / "config.json").write_bytes(config.encode("latin-1"))
    view = open_view(run)
    assert view.problem.startswith("config.json ") and "\n" not in view.problem
    assert view.settings is None and view.step == 1 and view.parameters is None
    assert view.state == State.INTERRUPTED


def test_files_in_place_of_a_run_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    for name, words in [
        ("none", "is not a directory; give that of a run"),
        ("file", "is not a directory"),
        ("hf", "is not a run: config.json was not written by smallmind"),
        ("", "`smallmind runs` lists those in runs/"),
    ]:
        refuses(words, open_view, tmp_path / name)


def test_an_imported_model_is_no_run_of_training(tmp_path):
    view = RunView(write(tmp_path / "run", saved={"imported": "llama"}))
    assert view.state == State.IMPORTED and view.steps is None and view.text is None


def test_the_best_evaluation_is_the_lowest_that_is_finite(tmp_path):
    losses = [(10, 2.0), (20, 1.5), (30, math.nan), (40, 1.75)]
    view = RunView(write(tmp_path / "run", *(evaluation(*point) for point in losses)))
    assert view.best["step"] == 20
