"""The directory of a run: who may write to it, and what happens when its files are disturbed."""

import errno
import json
import math
import os
import socket
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Run, Tokenizer, Training, TransformerModel
from smallmind.files import durable
from smallmind.runs.directory import RunDirectory
from smallmind.runs.files import MODEL
from smallmind.runs.metrics import read_metrics
from smallmind.training import checkpoint
from smallmind.training.records import FileWarningRecord, StepRecord
from smallmind.training.state import RunState
from tests.faults.disk import Quick
from tests.faults.disk import checkpoint as made_up
from tests.programs import refuses
from tests.runs import small

pytestmark = pytest.mark.usefixtures("quick_disk")

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 20
FIELDS = {**small.FIELDS, "n_head": 1, "val_every": 0, "save_every": 2, "warmup_steps": 1}


def create(path, **fields):
    return Run.create(text=TEXT, out=path, **{**FIELDS, **fields})


def steps_of(run):
    return [row["step"] for row in read_metrics(run).rows if "loss" in row]


def files(directory):
    """Every file below a directory, with its contents."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


# Whose directory it is


@pytest.mark.parametrize("what", ["checkpoints", "checkpoint", "model", "sample", "metrics"])
def test_a_directory_with_any_part_of_another_run_is_refused(tmp_path, text, cli, what):
    """Such as checkpoints of train_optimized, or of a run whose config was removed."""
    out = tmp_path / "out"
    out.mkdir()
    if what.startswith("checkpoint"):
        for step in (3, 90):
            checkpoint.save(out, made_up(step), best=what == "checkpoints")
    else:
        names = {"model": "model.safetensors", "sample": "samples.txt", "metrics": "metrics.jsonl"}
        (out / names[what]).write_text("precious")
    before = files(out)
    message = f"{out} already holds a run or part of one"
    cli.refuses(message, "train", text, "--steps 5 --backend numpy --out", out)
    assert files(out) == before


def test_a_text_of_the_user_is_not_overwritten(tmp_path):
    (tmp_path / "text.txt").write_text("precious")
    refuses("already holds a run or part of one", create, tmp_path)
    assert files(tmp_path) == {"text.txt": b"precious"}


def leave_a_start(path, tokenizer=True):
    """Leaves what a start does that is killed."""
    path.mkdir()
    (path / "metrics.jsonl").touch()
    if tokenizer:
        Tokenizer("another text").save(path / "tokenizer.json")


def test_what_a_killed_start_has_left_is_no_run_and_is_taken_over(tmp_path, text, cli):
    out = tmp_path / "runs" / "run"
    out.parent.mkdir()
    leave_a_start(out)
    (out / ".lock").write_text("999999999 " + socket.gethostname())
    assert f"No runs in {out.parent} yet" in cli("runs", out.parent).flat
    for message in (
        f"{out} is not a run: cannot read its config.json; its start was cut",
        f"start it again with --out {out}",
    ):
        cli.refuses(message, "train --resume", out)
    refuses("no unfinished run", Run.unfinished, out.parent)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FIELDS.items()]
    cli("train", text, "--out", out, flags)
    assert Run.open(out).is_finished


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "mine"), ("text.txt", "mine"), ("samples.txt", ""), ("config.json", "")],
)
def test_a_file_of_the_user_beside_what_a_start_has_left_is_kept(tmp_path, name, content):
    out = tmp_path / "run"
    leave_a_start(out, tokenizer=False)
    (out / name).write_text(content)
    before = files(out)
    refuses("already holds a run or part of one", create, out)
    assert files(out) == before


def test_a_start_that_takes_over_and_fails_leaves_the_text_of_the_user(tmp_path, monkeypatch):
    out = tmp_path / "run"
    leave_a_start(out)
    (out / "text.txt").write_text(TEXT)
    monkeypatch.setattr(RunDirectory, "save_config", die)
    with pytest.raises(KeyboardInterrupt):
        create(out)
    assert files(out) == {"text.txt": TEXT.encode()}


def test_a_start_under_way_is_not_taken_over(tmp_path):
    first = RunDirectory(tmp_path / "run").create()
    refuses("run is in use by another process", create, tmp_path / "run")
    refuses("another process is using the directory; wait for it", Run.open, tmp_path / "run")
    assert files(tmp_path / "run").keys() == {".lock", "metrics.jsonl"}
    first.discard()


def test_samples_of_later_steps_are_written_again(tmp_path):
    run = interrupted(tmp_path / "run")
    (run.path / "samples.txt").write_text("--- step 2\nold\n--- step 6\nof other weights\n")
    whole = create(tmp_path / "whole")
    whole.train()
    Run.open(run.path).resume()
    kept = b"--- step 2\nold\n" + (whole.path / "samples.txt").read_bytes()
    assert (run.path / "samples.txt").read_bytes() == kept


def test_a_new_run_is_locked_before_its_first_file(tmp_path, monkeypatch):
    locked = []
    touch = Path.touch

    def look(path, **options):
        locked.append((tmp_path / "run" / ".lock").exists())
        touch(path, **options)

    monkeypatch.setattr(Path, "touch", look)
    run = create(tmp_path / "run")
    assert locked == [True]
    refuses("is in use by process", Run.open(run.path).resume)
    run.train()
    assert not (run.path / ".lock").exists()


def test_a_start_that_is_refused_leaves_the_run_that_refused_it(tmp_path):
    """A stops after its config; B resumes the directory; A continues."""
    a = create(tmp_path / "run")
    a.unlock()  # as if the system had lost its lock
    b = Run.open(a.path)
    steps = b.steps()
    next(steps)
    before = files(a.path)
    refuses("is in use by process", a.train)
    a.discard_untrained()
    assert files(a.path) == before and "config.json" in before
    steps.close()
    refuses("has been trained to step 1 already: resume it", a.train)
    a.discard_untrained()
    assert steps_of(a.path) == [1]
    b.resume()
    assert steps_of(a.path) == [1, 2, 3, 4, 5, 6] and b.is_finished


def test_metrics_of_another_process_without_a_checkpoint_are_not_discarded(tmp_path):
    a = create(tmp_path / "run")
    a.unlock()
    (a.path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    a.discard_untrained()
    assert (a.path / "config.json").exists() and steps_of(a.path) == [1]


def test_a_start_that_fails_leaves_nothing(tmp_path, monkeypatch):
    class Full(Quick):
        def write(self, file, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "files", Full())
    with pytest.raises(OSError, match="No space left"):
        Run.create(out=tmp_path / "a" / "run", **FIELDS)
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="No space left"):
        Run.create(out=tmp_path / "a", **FIELDS)
    assert files(tmp_path) == {}


def test_leftovers_of_a_killed_run_are_removed_when_it_is_locked_again(tmp_path):
    run = create(tmp_path / "run")
    run.unlock()
    (run.path / "checkpoints").mkdir()
    ours = ["checkpoints/.step-00000002.safetensors.1-0.smallmind", ".config.json.1-3.smallmind"]
    for name in [*ours, ".table.csv.1-0.smallmind"]:
        (run.path / name).write_text("part")
    run.lock()
    assert not any((run.path / name).exists() for name in ours)
    assert (run.path / ".table.csv.1-0.smallmind").exists()  # another command may write it now


# Which run to resume


def test_a_second_resume_looks_at_the_lock_first(tmp_path, monkeypatch, cli):
    run = create(tmp_path / "run")
    monkeypatch.setattr(checkpoint, "newest", None)
    cli.refuses(f"{run.path} is in use by process {os.getpid()}", "train --resume", run.path)


def test_auto_passes_over_runs_that_are_going_or_have_failed(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    runs = {name: create(Path("runs") / name) for name in ("open", "failed", "going")}
    for name in ("open", "failed"):
        runs[name].unlock()
    with monkeypatch.context() as patch:
        patch.setattr(Training, "steps", diverge)
        with pytest.raises(FloatingPointError):
            runs["failed"].resume()
    for time, name in enumerate(("open", "failed", "going")):
        os.utime(Path("runs") / name / "config.json", (time, time))
    found = Run.unfinished()
    assert found.path == Path("runs/open")
    reasons = ["runs/going is in u", "runs/failed has fa"]
    assert [reason[:18] for reason in found.passed_over] == reasons
    found.unlock()
    printed = cli("train --resume auto").flat
    assert "Skipping a newer run: runs/failed has failed: the loss is not finite" in printed
    assert runs["open"].is_finished
    refuses(r"no unfinished run in runs.*runs/going is in use", Run.unfinished)
    runs["failed"].resume()  # named, it is tried again
    assert runs["failed"].is_finished and runs["failed"].directory.failure() is None


def diverge(*_, **__):
    raise FloatingPointError("the loss is not finite")
    yield


# Files that are disturbed


def interrupted(path, step=4):
    """A run on disk that was left after a step."""
    return small.left(create(path), step)


def warnings(records):
    return [record.warning for record in records if isinstance(record, FileWarningRecord)]


def test_metrics_that_were_removed_are_reported_and_the_run_resumes(tmp_path):
    run = interrupted(tmp_path / "run")
    (run.path / "metrics.jsonl").unlink()
    records = Run.open(run.path).resume()
    assert warnings(records) == ["metrics.jsonl was removed; its earlier records are lost"]
    assert steps_of(run.path) == [5, 6] and run.is_finished


@pytest.mark.parametrize("end", [b'{"step": 4, "lo', b'{"step": 4, "loss": 1.0}', b"\xff\n[]\n"])
def test_metrics_that_end_in_half_a_line_are_reported_and_the_run_resumes(tmp_path, end):
    run = interrupted(tmp_path / "run")
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(end)
    records = Run.open(run.path).resume()
    damaged = 2 if end.endswith(b"\n") else 1
    assert warnings(records) == [f"removed damaged lines from metrics.jsonl: {damaged}"]
    assert steps_of(run.path) == [1, 2, 3, 4, 5, 6] and read_metrics(run.path).unreadable == []


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("metrics.jsonl", "metrics.jsonl was removed; its earlier records are lost"),
        ("config.json", "config.json was removed; wrote it again"),
    ],
)
def test_a_file_removed_while_the_run_goes_on_is_reported(tmp_path, name, warning):
    run = create(tmp_path / "run")
    config, records = json.loads((run.path / "config.json").read_text()), []
    for record in run.steps():
        records.append(record)
        if isinstance(record, StepRecord) and record.step in (2, 4):
            (run.path / name).unlink()
    assert warnings(records) == [warning]  # once
    found = json.loads((run.path / "config.json").read_text())
    assert found.pop("sha256").keys() - config.pop("sha256").keys() == {"model.safetensors"}
    assert found == config
    assert Run.open(run.path).is_finished and steps_of(run.path)[-1] == 6


def test_metrics_cut_within_a_line_while_the_run_goes_on_lose_only_that_line(tmp_path):
    run = create(tmp_path / "run")
    for record in run.steps():
        if record.step == 2:
            os.truncate(run.path / "metrics.jsonl", 20)
    assert steps_of(run.path) == [3, 4, 5, 6] and read_metrics(run.path).unreadable == [1]


class FullDisk(Quick):
    """A disk with room for everything but this many more bytes of the metrics."""

    room = math.inf

    def write(self, file, data):
        if not is_temporary(file):
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: min(len(data), self.room)]
            self.room -= len(data)
        return super().write(file, data)


def is_temporary(file):
    return ".smallmind" in os.readlink(f"/proc/self/fd/{file}")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks up names of open files")
def test_metrics_on_a_full_disk_are_reported_and_written_once_there_is_room(tmp_path, monkeypatch):
    disk = FullDisk()
    monkeypatch.setattr(durable, "files", disk)
    run, records = create(tmp_path / "run"), []
    for record in run.steps():
        records.append(record)
        if isinstance(record, StepRecord):
            disk.room = {2: 10, 4: math.inf}.get(record.step, disk.room)
    assert warnings(records) == [
        "metrics.jsonl cannot be written, the next record tries again: No space left on device"
    ]
    assert steps_of(run.path) == [1, 2, 3, 4, 5, 6] and read_metrics(run.path).unreadable == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks up names of open files")
def test_a_run_whose_metrics_never_find_room_ends_with_an_error_and_resumes(tmp_path, monkeypatch):
    disk = FullDisk()
    monkeypatch.setattr(durable, "files", disk)
    run = create(tmp_path / "run")
    disk.room = 0
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        run.train()
    assert not run.is_finished and (run.path / "model.safetensors").exists()
    disk.room = math.inf
    run.resume()
    assert run.is_finished and run.final


def test_a_disk_without_room_to_cut_the_metrics_does_not_stop_a_resume(tmp_path, monkeypatch):
    run = interrupted(tmp_path / "run", step=5)
    (run.path / "checkpoints" / "step-00000005.safetensors").unlink()

    class NoNewFiles(Quick):
        def create(self, path):
            if "metrics" in path.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().create(path)

    monkeypatch.setattr(durable, "files", NoNewFiles())
    records = Run.open(run.path).resume()
    assert warnings(records) == [
        "metrics.jsonl keeps records from before this start: No space left on device"
    ]
    assert steps_of(run.path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(os.name == "nt", reason="no pipes there, and links need rights")
@pytest.mark.parametrize(
    ("name", "kind"), [("metrics.jsonl", "pipe"), ("samples.txt", "pipe"), ("samples.txt", "link")]
)
def test_a_pipe_or_a_link_in_place_of_a_file_is_refused_without_waiting(tmp_path, name, kind):
    run = interrupted(tmp_path / "run")
    (run.path / name).unlink(missing_ok=True)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.mkfifo(run.path / name) if kind == "pipe" else (run.path / name).symlink_to(precious)
    what = "not a regular file" if kind == "pipe" else "a symbolic link is in its place"
    refuses(rf"{name}: {what}; remove", Run.open(run.path).resume)
    assert precious.read_text() == "precious"


# The end of a run


PARTS = {"the model": "save_model", "the evaluation": "flush", "the sample": "save_sample"}


@pytest.mark.parametrize("part", PARTS)
def test_a_run_killed_before_an_end_is_complete_gets_the_rest_on_resume(
    tmp_path, monkeypatch, cli, part
):
    whole = create(tmp_path / "whole")
    whole.train()
    run = interrupted(tmp_path / "run", step=3)  # leaves a model, of step 3
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, PARTS[part], die)
        if part == "the evaluation":
            patch.setattr(RunDirectory, "log", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            Run.open(run.path).resume()
    assert run.newest().step == 6
    printed = cli("train --resume", run.path).out
    assert "Final held-out loss: " in printed and "Sample:" in printed
    for name in ("model.safetensors", "samples.txt"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()
    last = [read_metrics(r.path).rows[-1] for r in (run, whole)]
    assert last[0]["final_loss"] == last[1]["final_loss"] == whole.final.loss
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert sum("final_loss" in line for line in lines) == 1
    assert "The run is finished: 6 steps" in cli("train --resume", run.path).out


def die(*_):
    raise KeyboardInterrupt


def test_a_stop_during_the_final_evaluation_leaves_it_for_later(tmp_path):
    run = create(tmp_path / "run")
    run.train(on_record=lambda record: record.step == 6 and run.stop())
    assert run.final is None and not run.is_finished
    run.resume()
    assert run.final and run.sample and run.is_finished


def test_a_finished_run_of_an_earlier_version_is_finished(tmp_path):
    """It has no record of the final evaluation."""
    run = create(tmp_path / "run")
    run.train()
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join(x for x in lines if "final_" not in x))
    assert Run.open(run.path).is_finished


# Long tokenizers, and names that cannot be saved


def test_a_tokenizer_of_any_size_is_in_the_model_and_in_each_checkpoint(tmp_path):
    tokenizer = Tokenizer("".join(map(chr, range(0x10000, 0x10000 + 260_000))) + TEXT)
    model = TransformerModel(tokenizer.vocab_size, 8, 2, 1, 1, backend="numpy")
    state = Training(model, tokenizer, TEXT).state()
    checkpoint.check_size(state)
    checkpoint.save(tmp_path, state)
    RunDirectory(tmp_path).save_model(model, tokenizer, 0)
    name = checkpoint.file_name(0)
    alone = [(tmp_path / "checkpoints" / name).rename(tmp_path / name), tmp_path / MODEL]
    for path in alone:
        loaded, found = smallmind.load(path, "numpy")
        assert found.state() == tokenizer.state()
        np.testing.assert_array_equal(loaded.flat.data, model.flat.data)


def test_a_run_whose_names_do_not_fit_is_refused_before_it_is_saved():
    nothing = np.zeros(0, np.float32)
    names = (f"model.blocks.{i}.attention_norm.weight" for i in range(2**15))
    with pytest.raises(InputError, match=r"could not be saved: names .* Use fewer layers"):
        checkpoint.check_size(RunState(3, dict.fromkeys(names, nothing), {}))
