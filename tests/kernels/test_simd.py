"""Vector functions over their whole range."""

import numpy as np
import pytest
from numba import njit

from smallmind.kernels.codegen import simd
from smallmind.kernels.gelu import gelu_and_derivative_of, gelu_of


def apply(function):
    @njit(error_model="numpy")
    def loop(y, x):
        for i in range(0, x.size, simd.LANES):
            simd.store(y, i, function(simd.load(x, i)))

    def applied(x):
        y = np.empty_like(x)
        loop(y, x)
        return y

    return applied


def every_nth_float(step, start, stop):
    """Every step-th float32 between two positive numbers, and their negatives."""
    first, last = np.array([start, stop], np.float32).view(np.int32)
    x = np.arange(first, last, step, dtype=np.int32).view(np.float32)
    x = np.concatenate([x, -x])
    return x[: len(x) // 16 * 16]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:underflow")
@pytest.mark.parametrize(("name", "stop"), [("exp", 110), ("exp2", 160)])
def test_powers_are_accurate_over_their_whole_range(name, stop):
    x = every_nth_float(501, 1e-38, stop)
    exact = getattr(np, name)(x.astype(np.float64))
    computed = apply(getattr(simd, name))(x).astype(np.float64)
    largest = float(np.finfo(np.float32).max)
    inside = exact <= largest
    # 2e-7 relative; where the result is denormal, two of its units in the last place.
    allowed = np.maximum(2e-7 * exact[inside], 2 * 2.0**-149)
    assert (np.abs(computed[inside] - exact[inside]) <= allowed).all()
    assert np.isposinf(computed[exact > largest * (1 + 1e-6)]).all()


@pytest.mark.filterwarnings("ignore:underflow")
def test_normal_powers_are_those_of_exp2_and_never_less_than_the_smallest_normal_number():
    x = every_nth_float(501, 1e-38, 127)
    powers, normal = apply(simd.exp2)(x), apply(simd.exp2_normal)(x)
    smallest = np.finfo(np.float32).tiny
    is_normal = powers >= smallest
    np.testing.assert_array_equal(normal[is_normal], powers[is_normal])
    assert (normal[~is_normal] <= smallest).all()
    x = np.zeros(16, np.float32)
    x[:4] = np.nan, -np.inf, -3e38, 0
    computed = apply(simd.exp2_normal)(x)[:4]
    assert np.isnan(computed[0])
    assert (computed[1:3] <= smallest).all()
    assert computed[3] == 1


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", ["exp", "exp2", "sigmoid", "sigmoid_base2"])
def test_nan_infinities_and_overflow_are_handled(name):
    x = np.zeros(16, np.float32)
    x[:8] = np.nan, np.inf, -np.inf, 1000, -1000, 3e38, -3e38, 0
    at_zero, most = (1, np.inf) if name.startswith("exp") else (0.5, 1)
    expected = [np.nan, most, 0, most, 0, most, 0, at_zero]
    np.testing.assert_array_equal(apply(getattr(simd, name))(x)[:8], expected)


def test_log2_is_accurate_over_its_whole_range():
    x = every_nth_float(501, 1.2e-38, 3.4e38)
    x = x[x > 0][: len(x) // 32 * 16]
    exact = np.log2(x.astype(np.float64))
    computed = apply(simd.log2)(x).astype(np.float64)
    assert (np.abs(computed - exact) <= 6e-7 * np.maximum(1, np.abs(exact))).all()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:underflow")
@pytest.mark.parametrize(
    ("name", "power", "stop", "error", "smallest"),
    [  # 2e-7 relative; below -88.7 it is less than 3e-39, and 0. For base 2 that is below -125.
        ("sigmoid", np.exp, 110, 2e-7, 3e-39),
        ("sigmoid_base2", np.exp2, 160, 3e-7, 3e-38),
    ],
)
def test_sigmoid_is_accurate_over_its_whole_range(name, power, stop, error, smallest):
    x = every_nth_float(501, 1e-38, stop)
    exact = 1 / (1 + power(-x.astype(np.float64)))
    computed = apply(getattr(simd, name))(x).astype(np.float64)
    assert (np.abs(computed - exact) <= np.maximum(error * exact, smallest)).all()


@njit(error_model="numpy")
def _gelu_derivative_of(x):
    return gelu_and_derivative_of(x)[1]


def test_gelu_and_its_derivative_are_accurate_over_their_whole_range():
    for start, stop in ((-12, 12), (-1e4, 1e4)):
        x = np.linspace(start, stop, 1 << 20).astype(np.float32)
        z = x.astype(np.float64)
        tanh = np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))
        exact = 0.5 * z * (1 + tanh)
        slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)
        derivative = 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * slope
        assert (np.abs(apply(gelu_of)(x) - exact) <= 4e-7 * np.maximum(np.abs(z), 1)).all()
        assert np.abs(apply(_gelu_derivative_of)(x) - derivative).max() < 2e-6
