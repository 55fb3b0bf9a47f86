"""The gradient check itself: it must pass right gradients and fail those wrong by 0.1 %."""

import numpy as np
import pytest

from smallmind.kernels import reference
from tests.gradcheck import assert_gradients


def sum_of_cubes(x, y):
    return float((x**3 * y).sum())


def right(x, y):
    return [3 * x**2 * y, x**3]


ARRAYS = [np.random.default_rng(3).standard_normal((4, 5)) for _ in range(2)]


def test_right_gradients_pass():
    assert_gradients(sum_of_cubes, right(*ARRAYS), ARRAYS)


@pytest.mark.parametrize("index", [0, 1])
def test_a_gradient_wrong_by_a_thousandth_fails(index):
    gradients = right(*ARRAYS)
    gradients[index] = gradients[index] * 1.001
    with pytest.raises(AssertionError, match=f"argument {index}"):
        assert_gradients(sum_of_cubes, gradients, ARRAYS)


@pytest.mark.parametrize("index", [0, 1])
def test_one_wrong_element_fails(index):
    gradients = right(*ARRAYS)
    gradients[index][2, 3] += 0.001 * np.abs(gradients[index]).max()
    with pytest.raises(AssertionError):
        assert_gradients(sum_of_cubes, gradients, ARRAYS)


def test_a_sign_error_in_a_tiny_gradient_fails():
    scaled = [1e-9 * gradient for gradient in right(*ARRAYS)]
    scaled[0] = -scaled[0]
    with pytest.raises(AssertionError):
        assert_gradients(lambda x, y: 1e-9 * sum_of_cubes(x, y), scaled, ARRAYS)


def test_a_layernorm_backward_without_its_variance_term_fails():
    random = np.random.default_rng(0)
    x, weight, u = (random.standard_normal(s) for s in ((3, 8), (8,), (3, 8)))

    def f(x):
        out, mean, rstd = np.empty_like(x), np.empty(3), np.empty(3)
        reference.layernorm(out, mean, rstd, x, weight)
        return float((out * u).sum())

    rstd = 1 / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    dxhat = u * weight
    with pytest.raises(AssertionError):
        assert_gradients(f, [rstd * (dxhat - dxhat.mean(axis=1, keepdims=True))], [x])
