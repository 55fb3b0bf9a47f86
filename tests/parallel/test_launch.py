"""The environment names the other ranks; those on a machine divide its cores."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.checks import InputError
from smallmind.cli import main
from smallmind.cli.console import Console
from smallmind.cli.memory import check_memory, make_plan
from smallmind.console.signals import Stopped
from smallmind.memory import available
from smallmind.parallel import environment, launch
from smallmind.parallel.group import ALONE, Group
from smallmind.parallel.shards import bounds
from smallmind.settings.settings import Settings
from tests.programs import PATIENCE

NAMES = (*environment.SIZES, *environment.RANKS)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Whatever has started the tests, no launcher is seen."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def one_thread_per_core(monkeypatch):
    monkeypatch.setattr(launch, "_one_per_core", list)


def test_without_a_launcher_a_process_is_alone():
    assert environment.rank() is None and not environment.launched()
    assert launch.join(1.0) is ALONE


@pytest.mark.parametrize("name", environment.RANKS)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_launcher_tells_the_rank(monkeypatch, name, rank):
    monkeypatch.setenv(name, str(rank))
    assert environment.rank() == rank and environment.launched()


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1 2"])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_ranks_that_are_none_are_refused(monkeypatch, capsys, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match=f"{name}='{text}' in the environment must be a whole"):
        environment.launched()
    for words in (["runs"], ["train", "--steps", "2"], ["train", "--stepps", "2"]):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"smallmind: {name}='{text}' in the environment")


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "1.5"])
def test_a_number_of_threads_that_numba_cannot_start_is_refused(text):
    environ = {**os.environ, "NUMBA_NUM_THREADS": text}
    line = f"NUMBA_NUM_THREADS='{text}' in the environment must be a whole number of at least 1"

    def errors(status, *words):
        command = [sys.executable, *words]
        ended = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        assert ended.returncode == status
        return ended.stderr.splitlines()

    (found,) = errors(2, "-m", "smallmind", "train", "--steps", "2")
    assert found.startswith(f"smallmind: {line}")
    found = errors(1, "-c", "import smallmind; smallmind.TransformerModel")[-1]
    assert found.startswith(f"smallmind.checks.InputError: {line}")
    assert not errors(0, "-m", "smallmind", "train", "--help")


def test_neither_mpi4py_nor_numba_is_imported_without_a_launcher():
    code = (
        "import sys; from smallmind.parallel.environment import launched; assert not launched(); "
        "assert not {'mpi4py', 'numba', 'numpy'} & set(sys.modules); "
        "from smallmind.parallel.launch import join; join(1.0); assert 'mpi4py' not in sys.modules"
    )
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)


def test_without_mpi4py_a_single_rank_is_alone_and_several_are_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    assert launch.join(1.0) is ALONE
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(InputError, match="python -m pip install mpi4py"):
        launch.join(1.0)


@given(st.integers(1, 40), st.integers(1, 40))
def test_ranks_that_share_cores_divide_them(cores, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_one_per_core", list)
        shares = [launch.share_of_cores(i, [range(cores)] * ranks) for i in range(ranks)]
    assert all(shares)
    used = [cpu for share in shares for cpu in share]
    if ranks <= cores:
        assert sorted(used) == list(range(cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(len(share) == 1 for share in shares)
        counts = [used.count(cpu) for cpu in range(cores)]
        assert max(counts) - min(counts) <= 1


def test_ranks_that_are_bound_apart_stay_where_they_are(one_thread_per_core):
    bound = [[0, 1], [2, 3, 4]]
    assert [launch.share_of_cores(i, bound) for i in range(2)] == bound
    halves = [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert [launch.share_of_cores(i, halves) for i in range(4)] == [[0], [2], [1], [3]]


def test_where_the_system_does_not_tell_there_is_nothing_to_divide():
    assert launch.share_of_cores(0, [[], []]) == []


def test_a_core_counts_once_whatever_runs_on_it():
    usable = launch.usable_cpus()
    chosen = launch._one_per_core(usable)
    assert set(chosen) <= set(usable) and len(set(chosen)) == len(chosen)
    assert bool(chosen) == bool(usable)


class Mirrored(Group):
    """Two ranks, of which the other one shares `other`."""

    size = 2
    names = "rank 0", "rank 1"

    def __init__(self, rank, other):
        self.rank, self.other = rank, other

    def share(self, value):
        return [value, self.other] if self.rank == 0 else [self.other, value]


def fail():
    raise OSError("disk")


def test_an_error_of_any_rank_is_raised_with_its_name():
    with pytest.raises(OSError, match=r"^rank 0: disk$") as raised:
        Mirrored(0, (None, 5)).together(fail)
    assert isinstance(raised.value.__cause__, OSError)
    ranks = Mirrored(0, ("MemoryError", "full"))
    with pytest.raises(MemoryError, match=r"^rank 1: full$") as raised:
        ranks.together(lambda: 3)
    assert ranks.agreed is raised.value
    assert Mirrored(1, (None, 5)).together(lambda: 3) == [5, 3]


def test_another_error_counts_more_than_being_stopped():
    for rank in (0, 1):
        with pytest.raises(OSError, match=f"rank {1 - rank}: disk"):
            Mirrored(rank, ("OSError", "disk")).together(_stop)
    with pytest.raises(Stopped):
        Mirrored(0, (None, 1)).together(_stop)


def _stop():
    raise Stopped


def test_a_bug_is_not_shared():
    """It ends the program: another rank could not say where it is."""

    class Silent(Mirrored):
        def share(self, value):
            raise AssertionError("nothing to share")

    with pytest.raises(ZeroDivisionError):
        Silent(0, None).together(lambda: 1 // 0)


@given(st.integers(0, 30))
def test_divided_work_is_put_together_in_order(count):
    first, second = bounds(count, 2)[1], count
    squares = [i * i for i in range(count)]
    ranks = Mirrored(0, (None, squares[first:second]))
    assert ranks.divide(range(count), lambda i: i * i) == squares
    ranks = Mirrored(1, (None, squares[:first]))
    assert ranks.divide(range(count), lambda i: i * i) == squares


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that ends a process")
def test_a_start_of_mpi_that_never_ends_has_a_bound(tmp_path):
    (tmp_path / "mpi4py.py").write_text("import time\ntime.sleep(100)\n")
    code = "from smallmind.parallel.launch import join; join(0.3)"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environ = {**os.environ, "PMI_RANK": "0", "PMI_SIZE": "2", "PYTHONPATH": path}
    process = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environ, timeout=PATIENCE
    )
    assert process.returncode == -signal.SIGALRM


def test_ranks_on_a_machine_share_its_memory(monkeypatch):
    plan = make_plan(Settings().replace(precision="float32"))
    monkeypatch.setattr(available, "available_bytes", lambda: 3 * (plan.estimate.total - plan.held))
    for processes in (1, 2):
        check_memory(Console(), plan, processes)
    with pytest.raises(InputError, match="each of 4 processes on this machine needs"):
        check_memory(Console(), plan, 4)
