"""The kernels that are activations of perceptrons, by their descriptions."""

from smallmind.kernels import reference  # noqa: F401  # fills KERNELS
from smallmind.kernels.description import KERNELS


def columns_of(name):
    """How many columns the input of an activation has for each of y; None for other kernels."""
    backward = KERNELS.get(f"{name}_backward")
    if backward and [*backward.arguments.arrays][: backward.writes] == ["dx", "y"]:
        return 2 if KERNELS[name].arguments.arrays["x"].dims[1].startswith("2*") else 1
    return None


ACTIVATIONS = {name: columns for name in KERNELS if (columns := columns_of(name))}
