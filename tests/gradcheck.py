"""Gradients checked against finite differences, along one random direction.

For y = f(x) with backward pass J^T, <u, (f(x + h v) - f(x - h v)) / 2h> must equal <J^T u, v> for
any u and v: two forward passes, whatever the size of x.
"""

import numpy as np

H = 1e-5


def random_direction(random, array):
    direction = random.standard_normal(array.shape)
    return direction / np.linalg.norm(direction)


def numerical(f, arrays, index, direction):
    """The derivative of f(*arrays), a scalar, along a direction of arrays[index]."""

    def shifted(h):
        moved = list(arrays)
        moved[index] = arrays[index] + h * direction
        return f(*moved)

    return (shifted(H) - shifted(-H)) / (2 * H)


def assert_gradients(f, gradients, arrays, seeds=(0, 1, 2), tolerance=1e-6):
    """f(*arrays) -> scalar in float64; gradients holds its gradient for each of arrays."""
    for index, (array, gradient) in enumerate(zip(arrays, gradients, strict=True)):
        assert gradient.shape == array.shape
        for seed in seeds:
            direction = random_direction(np.random.default_rng(seed), array)
            expected = numerical(f, arrays, index, direction)
            actual = float(np.vdot(gradient, direction))
            # Relative to the gradient itself, not only to its part along this direction.
            scale = max(abs(expected), np.linalg.norm(gradient) / np.sqrt(array.size))
            error = abs(actual - expected)
            assert error <= tolerance * scale, (
                f"argument {index}, seed {seed}: {actual} should be {expected} "
                f"(relative error {error / scale:.1e})"
            )
