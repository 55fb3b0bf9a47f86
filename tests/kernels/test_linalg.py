"""The public matrix products: results, and which arguments are refused."""

import numpy as np
import pytest

import smallmind
from tests.programs import refuses

random = np.random.default_rng(0)
A = random.standard_normal((5, 7), dtype=np.float32)
B = random.standard_normal((7, 9), dtype=np.float32)
CASES = [
    (smallmind.matmul, A, B),
    (smallmind.matmul_transpose_a, np.ascontiguousarray(A.T), B),
    (smallmind.matmul_transpose_b, A, np.ascontiguousarray(B.T)),
]


@pytest.mark.parametrize(("product", "a", "b"), CASES)
def test_products_match_numpy(product, a, b):
    np.testing.assert_allclose(product(a, b), A @ B, rtol=1e-5, atol=1e-5)
    out = np.full((5, 9), np.nan, np.float32)
    assert product(a, b, out=out) is out
    np.testing.assert_allclose(out, A @ B, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("product", "a", "b"), CASES)
def test_other_layouts_and_dtypes_are_converted(product, a, b):
    for given_a in (np.asfortranarray(a), a.astype(np.float64), np.repeat(a, 2, axis=1)[:, ::2]):
        np.testing.assert_allclose(product(given_a, b), A @ B, rtol=1e-5, atol=1e-5)
    frozen = a.copy()
    frozen.flags.writeable = False
    np.testing.assert_allclose(product(frozen, b), A @ B, rtol=1e-5, atol=1e-5)


def test_mismatched_shapes_are_named():
    refuses(r"matmul: shapes \(5, 7\) and \(5, 7\) do not match", smallmind.matmul, A, A)
    refuses(r"matmul_transpose_b: shapes \(5, 7\) and \(7, 9\)", smallmind.matmul_transpose_b, A, B)
    refuses("do not match", smallmind.matmul, A[0], B)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((5, 8), "f"),
        np.zeros((5, 9)),
        np.zeros((9, 5), "f").T,
        np.frombuffer(bytes(180), "f").reshape(5, 9),
        [[0.0] * 9] * 5,
    ],
)
def test_an_invalid_out_is_refused(out):
    refuses("out must be a writable C-contiguous float32", smallmind.matmul, A, B, out=out)


def test_an_overlapping_out_is_refused():
    square = np.eye(4, dtype=np.float32)
    refuses("must not overlap", smallmind.matmul, square, square, out=square)


def test_complex_numbers_and_strings_are_refused():
    for wrong in (A.astype(complex), np.full(A.shape, "x")):
        refuses("not both real numbers", smallmind.matmul, wrong, B)
