"""Numbers in 16 bits: their conversion, and every kernel that reads and writes them."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from smallmind.kernels import compiled
from smallmind.kernels.codegen import simd
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to, to_float32
from tests.kernels.test_compiled import assert_close, normal, run_both
from tests.programs import output_of

SEED = 0

DTYPES = [FLOAT16, BFLOAT16]
SHAPES = [
    *((1, 1, 1), (7, 5, 3), (37, 130, 65), (65, 513, 129), (130, 700, 33), (385, 40, 17)),
    # Around the tiles of a matrix unit: 16 rows, 32 along K, 16 columns.
    *((16, 32, 16), (17, 33, 17), (15, 31, 15), (32, 64, 32), (33, 66, 49), (48, 62, 80)),
    *((31, 1030, 15), (224, 1100, 129)),
    *((5, 1023, 64), (7, 2045, 128)),  # the last block along K is deeper than the others
    *((823, 1030, 70), (1700, 2046, 33)),  # several strips of rows that are read in place
    # Few rows, whose sums fit the scratch in one part or in several; and a K of several blocks.
    *((1, 37, 50), (2, 64, 129), (3, 9001, 20), (4, 33, 17_000), (1, 3, 66_000)),
]


@njit
def convert(y, x):
    whole = x.size // simd.LANES * simd.LANES
    for i in range(0, whole, simd.LANES):
        simd.store(y, i, simd.load(x, i))
    if whole < x.size:
        tail = x.size - whole
        simd.store_first(y, whole, simd.load_first(x, whole, tail), tail)


@njit
def convert_one_by_one(y, x):
    for i in range(x.size):
        y[i] = simd.element(x, i)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_widened_exactly(dtype):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)[:-3]  # the last vector is partial
    for conversion in (convert, convert_one_by_one):
        y = np.empty(x.size, np.float32)
        conversion(y, x)
        np.testing.assert_array_equal(y, to_float32(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_to_the_nearest(dtype):
    exact = np.sort(to_float32(np.arange(2**16, dtype=np.uint16).view(dtype)))
    exact = exact[np.isfinite(exact)]
    # Ties, their neighbours, and random bits.
    with np.errstate(over="ignore"):
        ties = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
        up, down = (np.nextafter(ties, np.float32(end)) for end in (np.inf, -np.inf))
    bits = np.random.default_rng(0).integers(0, 2**32, 200_003, dtype=np.uint32)
    special = np.float32(
        [65504, 65519.996, 65520, 1e38, np.inf, -np.inf, np.nan, -0.0, 1.1754944e-38, 1e-39, -1e-44]
    )
    x = np.concatenate([ties, up, down, bits.view(np.float32), special])
    y = np.empty(x.size, dtype)
    convert(y, x)
    is_number = ~np.isnan(x)
    np.testing.assert_array_equal(y[is_number], round_to(x, dtype)[is_number])
    assert np.isnan(to_float32(y[~is_number])).all()
    assert np.isnan(to_float32(round_to(x, dtype)[~is_number])).all()
    if dtype == FLOAT16:
        with np.errstate(over="ignore", invalid="ignore"):
            np.testing.assert_array_equal(y[is_number], x.astype(np.float16).view(dtype)[is_number])
    # No neighbour is nearer; below 2**-126 bfloat16 has only zero.
    finite = x[np.isfinite(x) & (np.abs(x) <= exact[-1])].astype(np.float64)
    if dtype == BFLOAT16:
        finite[np.abs(finite) < 2.0**-126] = 0
    place = np.searchsorted(exact, finite).clip(1, len(exact) - 1)
    distance = np.minimum(np.abs(exact[place] - finite), np.abs(exact[place - 1] - finite))
    chosen = to_float32(round_to(finite.astype(np.float32), dtype))
    np.testing.assert_array_equal(np.abs(chosen - finite), distance)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names of x86")
@pytest.mark.parametrize("cpu", ["x86-64", "haswell"])
def test_conversion_is_the_same_on_other_cpus(cpu, tmp_path):
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    environment["SMALLMIND_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "widened or nearest"]
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout.decode()


PAIRED = """
import dataclasses, sys
import pytest
from smallmind.kernels.codegen import isa
isa.ISA = dataclasses.replace(isa.ISA, pairs=True, matrix_unit=False, fast_bfloat16=True)
sys.exit(pytest.main(["-q", *sys.argv[1:], "-k", "products or gelu or attention"]))
"""


@pytest.mark.slow
def test_products_of_pairs_work_without_a_matrix_unit(tmp_path):
    """Without a dot product, too: then it takes several instructions."""
    environment = {**os.environ, "SMALLMIND_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parent.parent.parent
    files = __file__, str(Path(__file__).parent / "test_attention_pairs.py")
    command = [sys.executable, "-c", PAIRED, *files]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout.decode()
    assert list(tmp_path.rglob("gemm.bfloat16_pairs.*"))


QUADS = PAIRED.replace("pairs=True", "pairs=True, quads=True").replace(" or attention", "")


@pytest.mark.slow
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names of x86")
def test_products_of_quads_work_without_their_instruction(tmp_path):
    """With vectors of four lanes, as ARM has them."""
    directory = {"SMALLMIND_CACHE_DIR": str(tmp_path), "NUMBA_ENABLE_AVX": "0"}
    environment = {**os.environ, **directory}
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", QUADS, __file__]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout.decode()
    assert list(tmp_path.rglob("gemm.bfloat16_quads.*"))


def half(values, dtype):
    return np.ascontiguousarray(round_to(values, dtype))


def assert_half_close(name, outputs, *inputs, tolerance=1e-5):
    """The compiled kernel may round each result once -> its outputs."""
    pairs = run_both(name, outputs, *inputs)
    assert_close(pairs, tolerance, min_scale=1.0)
    return [actual for actual, _ in pairs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "K", "N"), SHAPES)
def test_products_match_the_reference(random, dtype, M, K, N):
    a, b = normal(random, M, K), normal(random, K, N)
    bias, addend = half(normal(random, N), dtype), normal(random, M, N)
    for stored in (dtype, np.float32):
        added = round_to(addend, stored)
        out = ((M, N), stored)
        assert_half_close("matmul", [out], half(a, dtype), half(b, dtype), bias, added)
        assert_half_close("matmul_transpose_a", [out], half(a.T, dtype), half(b, dtype), added)
        assert_half_close("matmul_transpose_b", [out], half(a, dtype), half(b.T, dtype), added)
        assert_half_close("matmul", [out], half(a, dtype), half(b, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "K", "N"), SHAPES)
def test_the_forward_pass_applies_gelu_to_the_rounded_preactivation(random, dtype, M, K, N):
    a, b = half(normal(random, M, K), dtype), half(normal(random, K, N) / np.sqrt(K), dtype)
    activation, preactivation, again, dx = (np.zeros((M, N), dtype) for _ in range(4))
    compiled.matmul_gelu(activation, preactivation, a, b)
    compiled.gelu_backward(dx, again, preactivation, preactivation)
    np.testing.assert_array_equal(activation, again)


# The left operand ends where a page begins that cannot be read.
AT_THE_END = """
import ctypes, mmap
import numpy as np
from smallmind.kernels import compiled
from smallmind.kernels.number_types import BFLOAT16

memory = mmap.mmap(-1, 5 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
end = 4 * mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0) == 0
for M, K in ((1, 32), (17, 64), (20, 96), (33, 32), (3, 31)):
    a = np.frombuffer(memory, BFLOAT16, M * K, end - 2 * M * K).reshape(M, K)
    compiled.matmul(np.empty((M, 48), np.float32), a, np.zeros((K, 48), BFLOAT16))
print("read to the end")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_products_read_nothing_behind_the_left_operand():
    assert output_of(AT_THE_END) == "read to the end\n"
