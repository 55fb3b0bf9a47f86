"""Products of rows with matrices whose outputs come first: steps of decoding, and all others."""

import itertools

import numpy as np
import pytest

from smallmind.kernels import compiled
from smallmind.kernels.codegen.threads import set_threads, threads
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to
from tests.kernels.test_compiled import assert_close, normal, run_both

SEED = 29

ROWS = (*range(1, 18), 64)
OUTPUTS = (1, 2, 3, 4, 5, 16, 33, 66)
DEPTHS = (1, 7, 16, 31, 33, 64, 100, 129)
TYPES = {"float32": np.float32, "float16": FLOAT16, "bfloat16": BFLOAT16}
pytestmark = pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)


@pytest.fixture
def two_threads():
    before = threads()
    yield
    set_threads(before)


def operands(random, dtype, M, N, K, outputs_first):
    """-> a, b, bias and addend; by M, the last two are missing."""
    a, b = normal(random, M, K), normal(random, *((N, K) if outputs_first else (K, N)))
    bias, addend = normal(random, N), normal(random, M, N)
    a, b, bias, addend = (round_to(x, dtype) for x in (a, b, bias, addend))
    return a, b, None if M % 4 in (0, 3) else bias, None if M % 4 in (0, 2) else addend


@pytest.mark.parametrize("outputs_first", [True, False])
def test_rows_match_the_reference(random, dtype, outputs_first):
    for M, N, K in itertools.product(ROWS, OUTPUTS, DEPTHS):
        out = (M, N), dtype
        given = *operands(random, dtype, M, N, K, outputs_first), True, outputs_first
        pairs = run_both("matmul", [out], *given)
        if N in (5, 33):
            pairs += run_both("matmul_gelu", [out, out], *given)[1:]
        assert_close(pairs, 2e-6, min_scale=np.sqrt(K))


def test_logits_are_float32_whatever_the_operands(random, dtype):
    for M, N in itertools.product((1, 3, 8), (5, 70)):
        a, b, *_ = operands(random, dtype, M, N, 96, True)
        pairs = run_both("matmul", [((M, N), np.float32)], a, b, None, None, True, True)
        assert_close(pairs, 2e-6, min_scale=10)


@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize(("N", "K"), [(3, 5), (66, 100), (37, 768), (700, 300), (6, 20_000)])
def test_a_row_has_the_same_bits_alone_among_others_and_on_any_number_of_threads(
    random, dtype, N, K, outputs_first, two_threads
):
    for M in (2, 5, 6, 7, 13, 64):
        a, b, bias, addend = operands(random, dtype, M, N, K, outputs_first)
        found = []
        for count in (1, 2):
            set_threads(count)
            together = np.empty((M, N), dtype)
            compiled.matmul(together, a, b, bias, addend, True, outputs_first)
            found.append(together)
            for i in range(M):
                alone = np.empty((1, N), dtype)
                own = None if addend is None else addend[i : i + 1]
                compiled.matmul(alone, a[i : i + 1], b, bias, own, True, outputs_first)
                np.testing.assert_array_equal(alone[0], together[i])
        np.testing.assert_array_equal(*found)


def test_the_addend_may_be_the_result(random, dtype):
    for M, N in itertools.product((1, 7), (5, 40)):
        a, b, bias, addend = operands(random, dtype, 1, N, 48, True)
        a, addend = (round_to(normal(random, M, n), dtype) for n in (48, N))
        apart, within = np.empty((M, N), dtype), addend.copy()
        compiled.matmul(apart, a, b, bias, addend, True, True)
        compiled.matmul(within, a, b, bias, within, True, True)
        np.testing.assert_array_equal(apart, within)


def test_many_rows_have_the_bits_of_the_product_with_the_matrix_as_it_is_trained(random, dtype):
    """So a model that only runs has the losses of the run that trained it."""
    # Some columns that are left over of whole vectors are dot products elsewhere.
    for M, N, K in itertools.product(
        (5, 40, 130), (1, 16, 33, 65, 66, 96, 132), (5, 64, 300, 1100)
    ):
        a, w, bias, addend = operands(random, dtype, M, N, K, False)
        transposed = np.ascontiguousarray(w.T)
        for added in ((None, None), (bias, addend), (None, addend)):
            expected, found = np.empty((2, M, N), dtype)
            compiled.matmul(expected, a, w, *added)
            compiled.matmul(found, a, transposed, *added, False, True)
            np.testing.assert_array_equal(found, expected)
        expected, found = np.empty((2, 2, M, N), dtype)
        compiled.matmul_gelu(*expected, a, w, bias)
        compiled.matmul_gelu(*found, a, transposed, bias, None, False, True)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_or_column(random, dtype, number):
    for M, N, K in itertools.product((1, 5, 8), (3, 7, 8), (5, 40)):
        a, b = normal(random, M, K), normal(random, N, K)
        a[M // 2, K - 1] = b[2, K // 2] = number
        found = np.empty((M, N), np.float32)
        a, b = round_to(a, dtype), round_to(b, dtype)
        compiled.matmul(found, a, b, None, None, True, True)
        expected = np.ones((M, N), bool)
        expected[M // 2] = expected[:, 2] = False
        np.testing.assert_array_equal(np.isfinite(found), expected)
