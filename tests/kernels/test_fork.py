"""A process that is forked after kernels have run is told so; others are not affected."""

import os
import sys

import pytest

from tests.programs import PATIENCE, finished, printed_by

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

START = """
import multiprocessing, os, sys
import numpy as np
from smallmind.kernels.reduce import column_sum

def kernel(number=0):
    out = np.zeros(3, np.float32)
    column_sum(out, np.full((8192, 3), 5 / 8192, np.float32))  # enough for several threads
    return out[0]

def in_child(work):
    child = os.fork()
    if not child:
        try:
            print(work(), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("status", status, flush=True)

"""
ADVICE = "RuntimeError kernels cannot run in a process that was forked after they had run: start"


def run(program, **environment):
    words = [sys.executable, "-c", START + program]
    return printed_by(words, timeout=PATIENCE, **environment).splitlines()


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_a_forked_child_gets_an_error_or_threads_of_its_own(layer):
    lines = run("kernel(); in_child(kernel); print(kernel())", NUMBA_THREADING_LAYER=layer)
    if layer == "omp":  # its threads do not survive a fork
        assert lines[0].startswith(ADVICE) and "spawn" in lines[0]
    else:
        assert lines[0] == "5.0"
    assert lines[1:] == ["status 0", "5.0"]


def test_a_pool_of_forked_processes_gets_an_error():
    lines = run("""
kernel()
with multiprocessing.get_context("fork").Pool(2) as pool:
    try:
        pool.map(kernel, range(4))
    except Exception as error:
        print(type(error).__name__, error)
""")
    assert lines[0].startswith(ADVICE)


def test_a_child_killed_while_it_starts_threads_stops_no_other():
    """It holds a lock then, which by default all that are forked have in common."""
    lines = run(
        """
from numba.np.ufunc import parallel
from smallmind.kernels.codegen.threads import set_threads

class Killing:
    def __enter__(self):
        os.kill(os.getpid(), 9)

    __exit__ = None

def die():
    set_threads(1)
    parallel._backend_init_thread_lock = Killing()  # the next lock that it takes
    set_threads(1)

kernel()
in_child(die)
in_child(lambda: set_threads(1) or kernel())
set_threads(1)
print(kernel())
""",
        NUMBA_THREADING_LAYER="workqueue",
    )
    assert lines == ["status 9", "5.0", "status 0", "5.0"]


def test_a_child_forked_before_the_first_kernel_runs_kernels_itself():
    assert run("in_child(kernel); print(kernel())") == ["5.0", "status 0", "5.0"]


def test_a_forked_child_can_use_plain_numpy():
    assert run("""
import smallmind
model = smallmind.TransformerModel(5, 4, 8, 1, 2, backend="numpy")
kernel()
in_child(lambda: model.forward(np.zeros((1, 2), np.int32)).shape)
""") == ["(1, 2, 5)", "status 0"]


@pytest.mark.parametrize(
    ("variable", "value", "advice"),
    [
        ("NUMBA_THREADING_LAYER", "tbb", "python -m pip install tbb"),
        ("NUMBA_THREADING_LAYER", "nonsense", "unset NUMBA_THREADING_LAYER"),
        ("NUMBA_DISABLE_JIT", "1", "unset it, or use --backend numpy"),
    ],
)
def test_a_setting_of_numba_that_cannot_work_is_named_in_one_line(
    tmp_path, variable, value, advice
):
    if value == "tbb" and _has_tbb():
        pytest.skip("tbb is installed")
    command = [sys.executable, "-m", "smallmind", "train", "--steps", "1", "--out", "run"]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), variable: value}
    result = finished(command, tmp_path, **environment)
    assert result.returncode == 2
    assert result.stderr.startswith("smallmind: ") and result.stderr.count("\n") == 1
    assert advice in result.stderr
    assert not (tmp_path / "run").exists()


def _has_tbb():
    try:
        from numba.np.ufunc import tbbpool  # noqa: F401
    except ImportError:
        return False
    return True
