"""Integer division, for kernels and the Python that calls them: rounded up, or into shares."""

from smallmind.kernels.codegen.jit import called_jit


@called_jit
def ceil_div(n, size):
    """-> n / size, rounded up: the number of blocks of at most `size` that hold n."""
    return (n + size - 1) // size


@called_jit
def round_up(n, size):
    """-> n, rounded up to a multiple of size."""
    return (n + size - 1) // size * size


@called_jit
def row_share(rows, worker, workers):
    """Returns the rows first..last that a worker owns: as many as any other, within one."""
    return rows * worker // workers, rows * (worker + 1) // workers
