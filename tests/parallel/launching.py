"""Programs on several ranks, started by the mpiexec of whichever MPI there is.

By default that is the mpiexec beside this Python, or on PATH. SMALLMIND_TEST_MPI adds others: the
directories, separated as in PATH, that hold both an mpiexec and the Python for it.
"""

import os
import shutil
import subprocess
import sys
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.programs import PATIENCE, last_of_each

ROOT = Path(__file__).parents[2]
MARK = "SMALLMIND_TEST_RUN"  # the variable by which the processes of a run are found
BOUND = PATIENCE  # seconds in which every program here ends
OPEN_MPI = "Open MPI"


@dataclass(frozen=True)
class Launcher:
    """An mpiexec, and the Python whose mpi4py is for its MPI."""

    mpiexec: str
    python: str
    name: str

    def command(self, *programs):
        """programs: (ranks, words of Python's command line) each -> words for a shell."""
        words = [self.mpiexec]
        if self.name == OPEN_MPI:
            words += ["--allow-run-as-root", "--oversubscribe"]
        for i, (ranks, arguments) in enumerate(programs):
            words += [":"] * (i > 0) + ["-n", str(ranks), self.python, *map(str, arguments)]
        return words


def _launcher(mpiexec, python):
    shown = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False)
    name = next((name for name in (OPEN_MPI, "HYDRA") if name in shown.stdout), mpiexec)
    return Launcher(mpiexec, python, "MPICH" if name == "HYDRA" else name)


def _find():
    found = []
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    mpiexec = beside or shutil.which("mpiexec")
    if mpiexec and find_spec("mpi4py"):
        found.append(_launcher(mpiexec, sys.executable))
    for directory in filter(None, os.environ.get("SMALLMIND_TEST_MPI", "").split(os.pathsep)):
        other, python = (shutil.which(name, path=directory) for name in ("mpiexec", "python"))
        assert other and python, f"{directory} lacks mpiexec or python"
        found.append(_launcher(other, python))
    return found


LAUNCHERS = _find()
needs_mpi = pytest.mark.skipif(not LAUNCHERS, reason="mpi4py or mpiexec is missing")
on_every_mpi = pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda found: found.name)


@contextmanager
def started(words, **environment):
    """A program with its standard output and error; it and all its ranks end with the block."""
    mark = uuid.uuid4().hex
    ours = {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", MARK: mark}
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, **ours, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.mark = mark
    try:
        yield process
    finally:
        for child in ranks_of(process):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.communicate()


def ranks_of(process):
    """The processes that a program has started, and theirs, also when it has ended before them."""
    found = []
    for other in psutil.process_iter():
        with suppress(psutil.Error):
            if other.pid != process.pid and other.environ().get(MARK) == process.mark:
                found.append(other)
    return found


def ended(process):
    """Waits for the end of a program and its ranks -> exit status, what it printed, its errors."""
    try:
        out, err = process.communicate(timeout=BOUND)
    except subprocess.TimeoutExpired:
        raise AssertionError("it does not end") from None
    _, alive = psutil.wait_procs(ranks_of(process), BOUND)
    assert not alive, "ranks outlive mpiexec"
    return process.returncode, out, err


def run(words, **environment):
    """Runs a program to its end -> exit status, what it printed, its errors."""
    with started(words, **environment) as process:
        return ended(process)


def train_words(*flags, fault=()):
    """The command line of Python that trains, with a fault of tests.parallel.disturbed."""
    return ["-m", "tests.parallel.disturbed", *fault, "--", *last_of_each("train", *flags)]
