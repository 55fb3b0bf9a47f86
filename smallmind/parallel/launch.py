"""Joins the ranks that mpiexec has started, and divides the machine's cores among them."""

import os
import signal
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from smallmind.checks import InputError
from smallmind.parallel import environment
from smallmind.parallel.group import ALONE, Group

INSTALL = "python -m pip install mpi4py mpich"
GRACE = 10  # seconds in which ranks that all fail alike end by themselves
# Asks mpiexec on standard output to end all ranks, unless it closes that before.
ASK = """
import os, select
if not select.select([1], [], [], {grace})[0]:
    os.write(1, b"cmd=abort exitcode={status}\\n")
"""
BUILD = "python -m pip install --no-binary mpi4py mpi4py"  # for an MPI of the system


def join(patience: float, threads: int | None = None) -> Group:
    """Returns the ranks that mpiexec has started, of which this process is one; else ALONE.

    Unless a number of threads is given, the ranks on a machine divide its cores: this process and
    its threads then stay on their own. InputError if MPI cannot be used. A process whose MPI does
    not start within `patience` seconds ends: it is waiting for one that does not come.
    """
    if not environment.launched():
        return ALONE
    with _ending_after(patience):
        return _join(patience, threads)


@contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    """Ends this process if the block takes longer; MPI is deaf to Python while it starts."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _join(patience: float, threads: int | None) -> Group:
    expected = environment.size()
    try:
        from mpi4py import MPI
    except ImportError as error:
        if expected == 1:
            return ALONE
        raise InputError(f"several ranks need mpi4py and an MPI ({error}): {INSTALL}") from None
    except RuntimeError as error:  # there is no MPI that it could load
        raise InputError(
            f"mpi4py found no MPI ({str(error).splitlines()[0]}): {INSTALL}, or build it for that "
            f"of your system: {BUILD}"
        ) from None
    world = MPI.COMM_WORLD
    if expected not in (None, world.size):
        raise InputError(
            f"mpiexec has started {expected} ranks, but the MPI of mpi4py sees {world.size}: they "
            "are of different kinds. Use the mpiexec that is beside python in this environment, or "
            f"build mpi4py for the other one: {BUILD}"
        )
    from smallmind.parallel.mpi import MPIGroup

    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED)
    if threads is None:
        use_cores(share_of_cores(neighbours.rank, neighbours.allgather(usable_cpus())))
    group = MPIGroup(world, patience, neighbours.size)
    neighbours.Free()
    return group


def end_others(status: int) -> None:
    """Makes mpiexec end all ranks with this exit status, unless they have ended after GRACE.

    For one that ends without MPI: the others would wait for it. Open MPI's mpiexec notices that by
    itself, that of MPICH and Intel MPI has to be asked, by a process that outlives this one: if all
    ranks fail alike, each then ends with its own status.
    """
    with suppress(KeyError, ValueError, OSError):  # another mpiexec, or none
        channel = int(os.environ["PMI_FD"])
        if stat.S_ISSOCK(os.fstat(channel).st_mode):
            subprocess.Popen(
                environment.python(ASK.format(grace=GRACE, status=status)),
                stdin=subprocess.DEVNULL,
                stdout=channel,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


def usable_cpus() -> list[int]:
    """Returns the logical CPUs that this process may use; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def share_of_cores(rank: int, cpus: Sequence[Sequence[int]]) -> list[int]:
    """The CPUs that each rank may use -> the logical CPUs of one of them, one per core.

    Ranks that may use the same ones divide them, core by core; ranks that mpiexec has bound to
    others stay there. More ranks than cores take turns.
    """
    mine = list(cpus[rank])
    rivals = [i for i, others in enumerate(cpus) if list(others) == mine]
    cores = _one_per_core(mine)
    if not cores:
        return []
    if len(rivals) >= len(cores):
        return [cores[rivals.index(rank) % len(cores)]]
    first, last = (len(cores) * (rivals.index(rank) + i) // len(rivals) for i in range(2))
    return cores[first:last]


def _one_per_core(cpus: Sequence[int]) -> list[int]:
    """Returns the first logical CPU of every core."""
    chosen, seen = [], set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            core = siblings.read_text(encoding="ascii")
        except OSError:
            core = str(cpu)
        if core not in seen:
            seen.add(core)
            chosen.append(cpu)
    return chosen


def use_cores(cpus: Sequence[int]) -> None:
    """Keeps this process on these logical CPUs, a thread on each; with none, on a single thread."""
    # Numba reads it when it is imported.
    os.environ.setdefault("NUMBA_NUM_THREADS", str(max(1, len(cpus))))
    if cpus:
        os.sched_setaffinity(0, cpus)
