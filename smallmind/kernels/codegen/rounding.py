"""Division and multiples of integers, for kernels and for Python."""

from smallmind.kernels.codegen.jit import called_jit


@called_jit
def ceil_div(n, size):
    """n / size, rounded up: how many blocks of at most `size` hold n."""
    return (n + size - 1) // size


@called_jit
def round_up(n, size):
    """The next multiple of size."""
    return (n + size - 1) // size * size
