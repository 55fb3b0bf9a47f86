"""What the environment says about other ranks. Needs neither MPI nor NumPy."""

import os

# What the launchers of MPICH and Intel MPI, of Open MPI, and of Slurm tell each process: how many
# there are. PMIx alone tells only which one it is.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def launched() -> bool:
    """Whether mpiexec, or something like it, has started this process."""
    return rank() is not None


def rank() -> int | None:
    """The number of this process among those that mpiexec has started; None without mpiexec."""
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), None)
