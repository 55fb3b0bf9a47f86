"""Ctrl-C at any moment leaves a model that works, a pool that is whole and a lock that is free."""

import numpy as np
import pytest

import smallmind
from smallmind.lock import RunLock
from smallmind.memory.tensor_pool import TensorPool
from smallmind.training.profiler import TrainingProfiler
from tests.faults.interrupts import interrupted_everywhere

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
