"""Products with weights in blocks of small integers, against their plain twins."""

import itertools

import numpy as np
import pytest

from smallmind.kernels import compiled, reference
from smallmind.kernels.codegen.threads import set_threads, threads
from smallmind.kernels.quantised import Q4_0, Q8_0, dequantise, quantise
from tests.guards import Guarded
from tests.kernels.test_compiled import assert_close, normal

SEED = 23

ROWS = (*range(1, 10), 33, 100)
COLUMNS = (1, 2, 3, 5, 15, 16, 17, 33, 64, 65, 130)
DEPTHS = (32, 64, 96, 544)
pytestmark = pytest.mark.parametrize("dtype", [Q8_0, Q4_0], ids=["q8_0", "q4_0"])


@pytest.fixture
def two_threads():
    before = threads()
    yield
    set_threads(before)


def run_both(name, shape, *inputs):
    """-> what both kernels write, the compiled one the same bits on one thread and on two."""
    found = []
    for count in (1, 2):
        set_threads(count)
        out = Guarded(shape)
        getattr(compiled, name)(out.array, *inputs)
        out.assert_intact()
        found.append(out.array)
    np.testing.assert_array_equal(*found)
    exact = np.full(shape, np.nan)
    a, *others = inputs
    getattr(reference, name)(exact, a.astype(np.float64), *others)
    return found[0], exact


@pytest.mark.parametrize("rounds", [False])
def test_products_match_the_reference(random, dtype, rounds, two_threads):
    for R, N, K in itertools.product(ROWS, COLUMNS, DEPTHS):
        a, w = normal(random, R, K), quantise(normal(random, N, K), dtype)
        bias, addend = normal(random, N), normal(random, R, N)
        given = [(bias, addend), (None, addend), (bias, None), (None, None)][R % 4]
        pair = run_both("matmul_quantised", (R, N), a, w, *given, rounds)
        assert_close([pair], 1e-6, min_scale=np.sqrt(K))


def test_products_with_the_transpose_match_the_reference(random, dtype, two_threads):
    for R, N, K in itertools.product(ROWS, (*COLUMNS, 600), DEPTHS):
        a, w = normal(random, R, N), quantise(normal(random, N, K), dtype)
        assert_close([run_both("matmul_quantised_transpose", (R, K), a, w)], min_scale=np.sqrt(N))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("R", [1, 8, 9])
def test_an_addend_may_be_overwritten(random, dtype, rounds, R):
    a, w, addend = (
        normal(random, R, 96),
        quantise(normal(random, 37, 96), dtype),
        normal(random, R, 37),
    )
    apart = np.empty_like(addend)
    compiled.matmul_quantised(apart, a, w, None, addend, rounds)
    compiled.matmul_quantised(addend, a, w, None, addend, rounds)
    np.testing.assert_array_equal(addend, apart)


def test_rows_of_an_embedding_are_dequantised(random, dtype):
    for V, C, T in itertools.product((1, 7), DEPTHS, (1, 5)):
        weight, ids = (
            quantise(normal(random, V, C), dtype),
            random.integers(0, V, (3, T)).astype("i4"),
        )
        addend = normal(random, T, C)
        out = Guarded((3 * T, C))
        compiled.embedding(out.array, weight, ids)
        out.assert_intact()
        np.testing.assert_array_equal(out.array, dequantise(weight)[ids.reshape(-1)])
        expected = np.empty((3 * T, C), np.float32)
        reference.embedding(expected, weight, ids, addend, np.array(0))
        compiled.embedding(out.array, weight, ids, addend, np.array(0))
        np.testing.assert_array_equal(out.array, expected)
