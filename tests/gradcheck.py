"""The gradients of kernels, which have been computed, against finite differences."""

from smallmind import gradient_check

DIRECTIONS = 3


def assert_gradients(f, gradients, arrays):
    """f(*arrays) -> scalar in float64; gradients holds its gradient for each of arrays."""

    def backward(dy, *_):
        return [dy * gradient for gradient in gradients]

    found = gradient_check(f, *arrays, backward=backward, directions=DIRECTIONS)
    assert found.ok, found
