"""Reads how many ranks there are, and starts Python with the packages of this process.

Needs neither MPI nor NumPy.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from smallmind.checks import environment_number

# MPICH and Intel MPI, Open MPI, and Slurm tell each process by these variables how many ranks
# there are. PMIx alone tells only which one it is.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
ROOT = str(Path(__file__).resolve().parents[2])  # of this package


def launched() -> bool:
    """Returns True if mpiexec, or something like it, has started this process."""
    return rank() is not None


def rank() -> int | None:
    """-> the number of this process among those that mpiexec has started; None without mpiexec.

    InputError if any of the variables is no such number.
    """
    size()
    return _first(RANKS, low=0)


def is_first() -> bool:
    """Tells whether this process is the only one, or the first of those that mpiexec started."""
    return not rank()


def size() -> int | None:
    """-> the number of processes that mpiexec has started; None if it does not tell. InputError."""
    return _first(SIZES, low=1)


def python(program: str, *arguments: str) -> list[str]:
    """-> the command of a process that runs a program in Python, with the packages of this one.

    Files in the working directory are never taken for modules, as Python would take them: people
    start commands in folders that others have filled.
    """
    here = os.path.realpath(os.curdir)
    path = [folder for folder in sys.path if folder and os.path.realpath(folder) != here]
    if ROOT not in map(os.path.realpath, path):
        path.append(ROOT)  # last: what is beside the package stands for no module of Python's
    begin = f"import sys; sys.path[:] = {path!a}\n"
    return [sys.executable, "-P", "-c", begin + program, *arguments]


def _first(names: Sequence[str], low: int) -> int | None:
    """Returns the first of these variables that is set; all of them are checked."""
    numbers = [environment_number(name, low) for name in names]
    return next((number for number in numbers if number is not None), None)
