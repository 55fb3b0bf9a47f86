"""Ctrl-C at any moment leaves a model that works, a pool that is whole and a lock that is free."""

import random

import numpy as np
import pytest

import smallmind
from smallmind import Run, durable
from smallmind.lock import RunLock
from smallmind.memory.tensor_pool import TensorPool
from smallmind.runs.metrics import read_metrics
from smallmind.training import checkpoint
from smallmind.training.profiler import TrainingProfiler
from tests.faults.disk import Quick
from tests.faults.interrupts import count_moments, interrupted, interrupted_everywhere
from tests.runs.small import FIELDS, create

PASS = ("tensor_pool.py", "workspace.py", "transformer.py")


@pytest.mark.parametrize("name", ["forward", "losses", "loss_and_gradients"])
def test_ctrl_c_at_any_moment_of_a_pass_leaves_the_model_usable(name):
    model = smallmind.TransformerModel(5, 2, 4, 1, 1, bias=False, backend="numpy")
    pool = model.workspace.pool = TensorPool()
    ids = np.array([[1, 3]], np.int32)
    arguments = (ids,) if name == "forward" else (ids, ids)
    expected, interrupts = model.loss(ids, ids), 0
    for error in interrupted_everywhere(lambda: getattr(model, name)(*arguments), *PASS):
        assert pool.statistics().bytes_rented == 0, error
        assert model.loss(ids, ids) == expected
        interrupts += 1
    assert interrupts > 100
    held = pool.statistics().bytes_held
    assert pool.trim() == held and pool.statistics().bytes_held == 0


def test_ctrl_c_at_any_moment_returns_what_was_borrowed():
    pool = TensorPool()

    def borrow():
        with pool.borrow((2, 3)) as first, pool.borrow(600, np.int32):
            first[:] = 0

    interrupts = 0
    for _ in interrupted_everywhere(borrow, "tensor_pool.py"):
        assert pool.statistics().bytes_rented == 0
        interrupts += 1
    assert interrupts > 10


def test_ctrl_c_at_any_moment_frees_the_lock_of_a_run(tmp_path):
    def lock():
        with RunLock(tmp_path):
            pass

    interrupts = 0
    for error in interrupted_everywhere(lock, "lock.py"):
        error.__traceback__ = None  # until then the frames hold the lock
        lock()
        interrupts += 1
    assert interrupts > 10


def test_ctrl_c_at_any_moment_leaves_no_scope_of_a_profile_open():
    profiler = TrainingProfiler()

    def measure():
        with profiler.profile("step"), profiler.profile("forward"):
            pass

    for _ in interrupted_everywhere(measure, "profiler.py"):
        with profiler.profile("outer"), profiler.profile("inner"):
            pass
    paths = {row.path for row in profiler.rows()}
    assert ("outer", "inner") in paths


# The modules of a run: its steps, saves and end.
RUN = (
    *("session.py", "directory.py", "assembly.py", "ending.py", "loading.py"),
    *("training.py", "loop.py", "step.py", "gradients.py", "prefetch.py", "live_state.py"),
    *("spikes.py", "state.py", "checkpoint.py", "evaluation.py", "clock.py"),
    *("adamw.py", "optimizer.py", "clipping.py", "schedule.py", "parameters.py"),
    *("transformer.py", "workspace.py", "generation.py", "durable.py", "safetensors.py", "lock.py"),
)
MOMENTS = 40


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(durable, "files", Quick())


def small_run(path):
    return create(path, dropout=0.1, sample_every=2, keep=2)


def left_by(path):
    """What a run leaves: its tensors, the numbers of its metrics, its model and its samples."""
    newest, skipped = checkpoint.newest(path)
    assert not skipped and newest.step == FIELDS["steps"]
    tensors = {name: value.tobytes() for name, value in newest.tensors.items()}
    numbers = ("step", "loss", "lr", "grad_norm", "val_loss", "final_loss")
    rows = [[row.get(name) for name in numbers] for row in read_metrics(path).rows]
    files = {name: (path / name).read_bytes() for name in ("model.safetensors", "samples.txt")}
    return {**tensors, "metrics": rows, **files, "names": sorted(map(str, path.rglob("[!.]*")))}


def assert_same(path, other):
    left, expected = left_by(path), left_by(other)
    expected["names"] = [name.replace(str(other), str(path)) for name in expected["names"]]
    assert left == expected


@pytest.mark.parametrize("is_reopened", [False, True], ids=["same object", "reopened"])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_a_run_interrupted_anywhere_ends_as_if_undisturbed(tmp_path, quick, is_reopened, times):
    """However early or late: before the first checkpoint, in a save, in the last evaluation."""
    whole = small_run(tmp_path / "whole")
    count, moments = count_moments(whole.train, *RUN), random.Random(times + 10 * is_reopened)
    interrupts = 0
    for number in range(MOMENTS):
        run = small_run(tmp_path / str(number))
        work = run.train
        for _ in range(times):
            interrupts += interrupted(work, moments.randrange(count), *RUN)
            run = Run.open(run.path) if is_reopened else run
            work = run.resume
        records = run.resume()
        assert run.is_finished and (run.final or not records)
        assert run.resume() == []
        assert_same(run.path, whole.path)
    assert interrupts > MOMENTS * times / 2


@pytest.mark.parametrize("moment", range(0, 4000, 101))
def test_a_creation_interrupted_anywhere_can_be_repeated(tmp_path, quick, moment):
    out = tmp_path / "run"
    interrupted(lambda: small_run(out), moment, *RUN)
    run = Run.open(out) if (out / "config.json").exists() else small_run(out)
    assert run.train() and run.is_finished
