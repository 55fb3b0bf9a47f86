"""What all tests have in common: two processes, and runs that start and end quickly."""

import platform
from pathlib import Path

import pytest
from hypothesis import settings

from smallmind.runs import pace
from smallmind.training import training

# On any number of cores: each process runs its kernels on all of them. Two are enough to use them
# while one starts a process, waits for a disk or runs plain Python.
PROCESSES = 2

# An example may take any time: on a busy machine the usual 200 ms pass without a fault.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Directories are tested in PROCESSES, if pytest-xdist is there; files in this one, at once.

    A file stays in one process, which trains only once what its tests share. -n 0 turns it off.
    """
    is_chosen = getattr(config.option, "numprocesses", 0) is not None  # or there is no xdist
    if is_chosen or config.option.usepdb or hasattr(config, "workerinput"):
        return
    if all(Path(argument).is_dir() for argument in config.args):
        config.option.numprocesses, config.option.dist = PROCESSES, "loadfile"


def pytest_configure(config):
    """On ARM the BLAS of NumPy computes with what is beside a matrix, and NumPy warns of that."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        kinds = "divide by zero|overflow|invalid value"
        line = f"ignore:({kinds}) encountered in matmul:RuntimeWarning"
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def untimed_start(monkeypatch):
    """No passes are timed before a run starts.

    Tests plant faults in the nth pass of a model and mean a pass that trains; and timing the model
    of `smallmind estimate` takes longer than most tests. The fixtures of modules and separate
    processes time their passes, and tests/runs/test_pace.py tests that this changes nothing.
    """
    monkeypatch.setattr(pace, "rough_pace", lambda *_: pace.Pace(0.01, 0.01, 0.0, 0.01))


@pytest.fixture(autouse=True)
def short_sample(monkeypatch):
    """A run ends with a sample of 20 tokens: 400 take longer than training a small model."""
    monkeypatch.setattr(training, "SAMPLE_TOKENS", 20)
