"""Ctrl-C at any moment leaves a model that works, a pool that is whole and a lock that is free."""

import itertools
import os
import random

import numpy as np
import pytest

import smallmind
from smallmind import Run
from smallmind.files import durable
from smallmind.files.lock import RunLock
from smallmind.memory.tensor_pool import TensorPool
from smallmind.runs.metrics import read_metrics
from smallmind.training import checkpoint, evaluation
from smallmind.training.profiler import TrainingProfiler
from tests.faults.disk import Quick
from tests.faults.interrupts import count_moments, interrupted, interrupted_everywhere
from tests.runs.small import FIELDS, create

PASS = ("tensor_pool.py", "workspace.py", "transformer.py")


SLOW = pytest.mark.slow  # each goes through all moments
# An interrupt between opening a file and `with` leaves it to the garbage collector.
IGNORES_UNCLOSED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(pytest.param(name, 1, marks=SLOW) for name in ("forward", "losses")),
        pytest.param("loss_and_gradients", 1, marks=SLOW),
        ("loss_and_gradients", 7),
    ],
)
def test_ctrl_c_at_any_moment_of_a_pass_leaves_the_model_usable(name, every):
    model = smallmind.TransformerModel(5, 2, 4, 1, 1, bias=False, backend="numpy")
    pool = model.workspace.pool = TensorPool()
    ids = np.array([[1, 3]], np.int32)
    arguments = (ids,) if name == "forward" else (ids, ids)
    expected, interrupts = model.loss(ids, ids), 0

    def compute():
        return getattr(model, name)(*arguments)

    for error in interrupted_everywhere(compute, *PASS, every=every):
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


# Modules of a run: its session, steps, saves and end.
RUN = (
    *("run.py", "saved.py", "session.py", "directory.py", "durable.py", "lock.py", "checkpoint.py"),
    *("training.py", "loop.py", "gradients.py", "live_state.py", "state.py"),
    *("spikes.py", "evaluation.py", "adamw.py", "optimizer.py", "parameters.py"),
    *("transformer.py", "decoder.py", "safetensors.py"),
)


def small_run(path):
    return create(path, dropout=0.1, sample_every=2, keep=2)


def left_by(path):
    """The remains of a run: its tensors, the numbers of its metrics, its model and its samples."""
    newest, skipped = checkpoint.newest(path)
    assert not skipped and newest.step == FIELDS["steps"]
    tensors = {name: value.tobytes() for name, value in newest.tensors.items()}
    numbers = ("step", "loss", "lr", "grad_norm", "val_loss", "final_loss")
    rows = [[row.get(name) for name in numbers] for row in read_metrics(path).rows]
    files = {name: (path / name).read_bytes() for name in ("model.safetensors", "samples.txt")}
    names = sorted(os.listdir(path))  # which checkpoints there are depends on where it stopped
    return {**tensors, **files, "metrics": rows, "names": names}


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    """Module -> the number of moments of a whole run in it."""
    run = small_run(tmp_path_factory.mktemp("moments") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "files", Quick())
        patch.setattr(evaluation, "SAMPLE_TOKENS", 20)
        return count_moments(run.train, *RUN)


@IGNORES_UNCLOSED
@pytest.mark.parametrize("is_reopened", [False, True], ids=["same object", "reopened"])
@pytest.mark.parametrize("times", [5, pytest.param(200, marks=SLOW)])
def test_a_run_interrupted_anywhere_ends_as_if_undisturbed(
    tmp_path, quick_disk, moments, is_reopened, times
):
    """However early or late, also twice: before the first checkpoint, in a save, at the end."""
    whole = small_run(tmp_path / "whole")
    whole.train()
    expected, seeded, interrupts = left_by(whole.path), random.Random(is_reopened), 0
    for number in range(times):
        run = small_run(tmp_path / str(number))
        work = run.train
        for _ in range(1 + number % 2):
            name = seeded.choice(RUN)
            interrupts += interrupted(work, seeded.randrange(moments[name]), name)
            run = Run.open(run.path) if is_reopened else run
            work = run.resume
        run.resume()
        assert run.is_finished and run.resume() == []
        assert left_by(run.path) == expected
    assert interrupts > times


@IGNORES_UNCLOSED
@pytest.mark.parametrize("every", [pytest.param(1, marks=SLOW), 7])
@pytest.mark.parametrize("name", ["creating.py", "directory.py", "durable.py", "lock.py"])
def test_a_creation_interrupted_anywhere_can_be_repeated(tmp_path, quick_disk, name, every):
    for number in itertools.count(step=every):
        out = tmp_path / str(number)
        if not interrupted(lambda out=out: small_run(out), number, name):
            break
        run = Run.open(out) if (out / "config.json").exists() else small_run(out)
        run.lock()
        run.unlock()
    assert number > 10
