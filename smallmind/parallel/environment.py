"""Reads from the environment how many ranks there are. Needs neither MPI nor NumPy."""

from collections.abc import Sequence

from smallmind.checks import environment_number

# MPICH and Intel MPI, Open MPI, and Slurm tell each process by these variables how many ranks
# there are. PMIx alone tells only which one it is.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def launched() -> bool:
    """True if mpiexec, or something like it, has started this process."""
    return rank() is not None


def rank() -> int | None:
    """The number of this process among those that mpiexec has started; None without mpiexec.

    InputError if any of the variables is no such number.
    """
    size()
    return _first(RANKS, low=0)


def is_first() -> bool:
    """Tells whether this process is the only one, or the first of those that mpiexec started."""
    return not rank()


def size() -> int | None:
    """The number of processes that mpiexec has started; None if it does not tell. InputError."""
    return _first(SIZES, low=1)


def _first(names: Sequence[str], low: int) -> int | None:
    """The first of these variables that is set; all of them are checked."""
    numbers = [environment_number(name, low) for name in names]
    return next((number for number in numbers if number is not None), None)
