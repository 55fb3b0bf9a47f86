"""Sums and copies of whole vectors: the same bits as in plain NumPy, in every type."""

import itertools

import numpy as np
import pytest

from smallmind.kernels import compiled, reference
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to
from tests.guards import Guarded
from tests.kernels.test_compiled import normal

SEED = 3

SIZES = range(1, 131)

DTYPES = (np.float32, FLOAT16, BFLOAT16)
LARGE = 0, 1023, 4096, 70_001  # no element, and many for every thread


def vectors(random, dtype, n):
    return [round_to(normal(random, n), dtype) for _ in range(2)]


def assert_same(fast, slow):
    fast.assert_intact()
    np.testing.assert_array_equal(fast.array.view(np.uint8), slow.view(np.uint8))


@pytest.mark.parametrize(("dtype", "result"), [*itertools.product(DTYPES, DTYPES)])
def test_sums_and_copies_have_the_bits_of_the_reference(random, dtype, result):
    for n in (*SIZES, *LARGE):
        x, y = vectors(random, dtype, n)
        for name, inputs in (("add_vectors", (x, y)), ("copy_vector", (x,))):
            fast, slow = Guarded((n,), dtype=result), np.empty(n, result)
            getattr(compiled, name)(fast.array, *inputs)
            getattr(reference, name)(slow, *inputs)
            assert_same(fast, slow)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_cleared_is_zero_and_nothing_else(dtype):
    for n in (*SIZES, *LARGE):
        fast = Guarded((n, 3), dtype=dtype)
        compiled.clear(fast.array)
        assert_same(fast, np.zeros((n, 3), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_sum_may_replace_one_of_its_terms(random, dtype, place):
    for n in (5, 64, 1023):
        terms = vectors(random, dtype, n)
        expected = np.empty(n, dtype)
        reference.add_vectors(expected, *terms)
        compiled.add_vectors(terms[place], *terms)
        np.testing.assert_array_equal(terms[place], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_reach_the_sum_alone(random, dtype):
    for value in (np.nan, np.inf, -np.inf):
        x, y = vectors(random, dtype, 37)
        x[30] = round_to(np.array([value], np.float32), dtype)[0]
        out, copy = np.empty(37, np.float32), np.empty(37, np.float32)
        compiled.add_vectors(out, x, y)
        compiled.copy_vector(copy, x)
        for result in (out, copy):
            np.testing.assert_array_equal(result[30], np.float32(value))
            assert np.isfinite(np.delete(result, 30)).all()
