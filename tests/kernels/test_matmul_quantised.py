"""Products with weights in blocks of small integers, against their plain twins."""

import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smallmind.kernels import compiled, reference
from smallmind.kernels.codegen.threads import set_threads, threads
from smallmind.kernels.number_types import BLOCK, DTYPES, in_groups, round_to, to_float32
from smallmind.parts import QUANTISED
from tests.guards import Guarded
from tests.kernels.test_compiled import assert_close, normal

SEED = 23

ROWS = (*range(1, 10), 33, 100)
COLUMNS = (1, 2, 3, 5, 15, 16, 17, 33, 64, 65, 130)
DEPTHS = (32, 64, 96, 544)
pytestmark = pytest.mark.parametrize("dtype", [DTYPES[name] for name in QUANTISED], ids=QUANTISED)


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


def between_guards(blocks):
    """Copies rows of blocks between two whose scales are NaN."""
    all_rows = np.zeros((len(blocks) + 2, *blocks.shape[1:]), blocks.dtype)
    all_rows["scale"] = np.nan
    all_rows[1:-1] = blocks
    return all_rows[1:-1]


def operands(random, dtype, R, N, K):
    """-> a, w, bias and addend; by R, the last two are missing."""
    a, w = normal(random, R, K), between_guards(round_to(normal(random, N, K), dtype))
    bias, addend = normal(random, N), normal(random, R, N)
    return a, w, None if R % 4 in (0, 3) else bias, None if R % 4 in (0, 2) else addend


def test_products_match_the_reference(random, dtype, two_threads):
    for R, N, K in itertools.product(ROWS, COLUMNS, DEPTHS):
        pair = run_both("matmul_quantised", (R, N), *operands(random, dtype, R, N, K))
        assert_close([pair], 1e-6, min_scale=np.sqrt(K))


def test_products_of_rounded_rows_have_the_bits_of_the_reference(random, dtype, two_threads):
    depths = [(*shape, K) for shape in ((1, 3), (5, 2)) for K in (2048, 4096)]
    for R, N, K in (
        *itertools.product((*range(1, 10), 15), COLUMNS, DEPTHS),
        *depths,
        (300, 17, 64),
    ):
        a, *others = operands(random, dtype, R, N, K)
        a *= 10.0 ** random.integers(-3, 3, (R, 1)).astype(np.float32)
        a[0, :BLOCK] = [0, 1e-35, 1e35][N % 3]
        found, _ = run_both("matmul_quantised", (R, N), a, *others, True)
        expected = np.empty_like(found)
        reference.matmul_quantised(expected, a, *others, True)
        np.testing.assert_array_equal(found, expected)
        w, *added = others
        found, _ = run_both("matmul_quantised", (R, N), a, in_groups(w), *added, True, True)
        np.testing.assert_array_equal(found, expected)


def test_blocks_are_arranged_in_groups_and_back(random, dtype, two_threads):
    for N, K, count in itertools.product((1, 15, 16, 33, 100), (32, 96), (1, 2)):
        set_threads(count)
        w = round_to(normal(random, N, K), dtype)
        arranged = between_guards(w)
        compiled.arrange_blocks(arranged)
        assert arranged.tobytes() == in_groups(w).tobytes()
        assert (arranged.tobytes() == w.tobytes()) == (N < 16)
        compiled.arrange_blocks(arranged, True)
        assert arranged.tobytes() == w.tobytes()
        assert np.isnan(arranged.base["scale"][[0, -1]]).all()
        expected = in_groups(w)
        reference.arrange_blocks(expected, True)
        assert expected.tobytes() == w.tobytes()


def test_rounding_a_row_adds_half_a_step_at_most(random, dtype):
    a, w = normal(random, 8, 768), round_to(normal(random, 65, 768), dtype)
    found, exact = np.empty((2, 8, 65), np.float32)
    compiled.matmul_quantised(found, a, w, None, None, True)
    compiled.matmul_quantised(exact, a, w)
    steps = np.abs(a).reshape(8, -1, 1, BLOCK).max(axis=3, keepdims=True) / 127
    magnitudes = np.abs(to_float32(w)).reshape(65, -1, BLOCK)
    most = np.einsum("rbij,nbk->rn", steps / 2, magnitudes)
    assert np.all(np.abs(found - exact) <= most + 1e-4)
    assert np.abs(found - exact).max() > 0


@pytest.mark.parametrize("R", [2, 3, 5, 8, 9, 33, 64])
def test_a_row_has_the_same_bits_alone_and_among_others(random, dtype, R):
    a, w = normal(random, R, 96), round_to(normal(random, 33, 96), dtype)
    together, alone = np.empty((R, 33), np.float32), np.empty((1, 33), np.float32)
    compiled.matmul_quantised(together, a, w, None, None, True)
    for i in range(R):
        compiled.matmul_quantised(alone, a[i : i + 1], w, None, None, True)
        np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row_or_column(random, dtype, number):
    for R, rounds in itertools.product((1, 6, 9), (False, True)):
        a, w = normal(random, R, 96), round_to(normal(random, 7, 96), dtype)
        a[R // 2, 33] = number
        w[3, 2]["scale"] = number
        found = np.empty((R, 7), np.float32)
        with np.errstate(invalid="ignore"):
            compiled.matmul_quantised(found, a, w, None, None, rounds)
        expected = np.ones((R, 7), bool)
        expected[R // 2] = expected[:, 3] = False
        np.testing.assert_array_equal(np.isfinite(found), expected)


@pytest.mark.parametrize("q", [-128, -127, 127])
def test_the_largest_integers_do_not_overflow(dtype, q):
    w = np.zeros((2, 4), dtype)
    w["scale"] = 1
    w["q"] = q if dtype == DTYPES["q8_0"] else 255 if q > 0 else 0
    for sign in (-1, 1):
        a = np.full((1, 128), sign * 127, np.float32)
        found = np.empty((1, 2), np.float32)
        compiled.matmul_quantised(found, a, w, None, None, True)
        np.testing.assert_array_equal(found, a @ to_float32(w).T)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names of x86")
@pytest.mark.parametrize("cpu", ["x86-64", "haswell", "skylake-avx512"])
def test_rounded_rows_have_the_same_bits_on_other_cpus(dtype, cpu, tmp_path):
    """Without a dot product of bytes, in vectors of every width."""
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    environment["SMALLMIND_CACHE_DIR"] = str(tmp_path)
    name = next(name for name in QUANTISED if DTYPES[name] == dtype)
    chosen = f"{name} and (bits or finite or overflow or matches)"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", __file__, "-k", chosen]
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout.decode()


def test_products_with_the_transpose_match_the_reference(random, dtype, two_threads):
    for R, N, K in itertools.product(ROWS, (*COLUMNS, 600), DEPTHS):
        a, w = normal(random, R, N), round_to(normal(random, N, K), dtype)
        assert_close([run_both("matmul_quantised_transpose", (R, K), a, w)], min_scale=np.sqrt(N))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("R", [1, 8, 9])
def test_an_addend_may_be_overwritten(random, dtype, rounds, R):
    a, w, addend = (
        normal(random, R, 96),
        round_to(normal(random, 37, 96), dtype),
        normal(random, R, 37),
    )
    apart = np.empty_like(addend)
    compiled.matmul_quantised(apart, a, w, None, addend, rounds)
    compiled.matmul_quantised(addend, a, w, None, addend, rounds)
    np.testing.assert_array_equal(addend, apart)


def test_rows_of_an_embedding_are_dequantised(random, dtype):
    for V, C, T in itertools.product((1, 7, 37), DEPTHS, (1, 5)):
        weight, ids = (
            round_to(normal(random, V, C), dtype),
            random.integers(0, V, (3, T)).astype("i4"),
        )
        addend = normal(random, T, C)
        out = Guarded((3 * T, C))
        compiled.embedding(out.array, weight, ids)
        out.assert_intact()
        np.testing.assert_array_equal(out.array, to_float32(weight)[ids.reshape(-1)])
        expected = np.empty((3 * T, C), np.float32)
        compiled.embedding(out.array, in_groups(weight), ids, in_groups=True)
        np.testing.assert_array_equal(out.array, to_float32(weight)[ids.reshape(-1)])
        reference.embedding(expected, weight, ids, addend, np.array([0]))
        compiled.embedding(out.array, weight, ids, addend, np.array([0]))
        np.testing.assert_array_equal(out.array, expected)
