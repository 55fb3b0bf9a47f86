"""Numbers in 16 bits: their conversion, and every kernel that reads and writes them."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from smallmind.kernels import compiled, reference
from smallmind.kernels.codegen import simd
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.half import BFLOAT16, FLOAT16, round_to, to_float32
from smallmind.kernels.reference_optimizers import AdamWCoefficients
from tests.guards import Guarded
from tests.programs import output_of

DTYPES = [FLOAT16, BFLOAT16]
# Half a unit in the last place, relative.
ROUNDING = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8, np.float32: 1e-6}
SHAPES = [
    *((1, 1, 1), (7, 5, 3), (37, 130, 65), (65, 513, 129), (130, 700, 33), (385, 40, 17)),
    # Around the tiles of a matrix unit: 16 rows, 32 along K, 16 columns.
    *((16, 32, 16), (17, 33, 17), (15, 31, 15), (32, 64, 32), (33, 66, 49), (48, 62, 80)),
    *((31, 1030, 15), (224, 1100, 129)),
    *((5, 1023, 64), (7, 2045, 128)),  # the last block along K is deeper than the others
    # Few rows, whose sums fit the scratch in one part or in several; and a K of several blocks.
    *((1, 37, 50), (2, 64, 129), (3, 9001, 20), (4, 33, 17_000), (1, 3, 66_000)),
]
KEY = 0x123456789ABCDEF


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


def normal(random, *shape):
    return random.standard_normal(shape).astype(np.float32)


def half(values, dtype):
    return np.ascontiguousarray(round_to(values, dtype))


def assert_half_close(name, outputs, *inputs, tolerance=1e-5):
    """Runs both kernels on the same stored numbers; the compiled one may round each result once.

    outputs: (shape, dtype), initially NaN, or arrays that are changed.
    """
    fast, slow = [], []
    for output in outputs:
        if isinstance(output, tuple):
            fast.append(Guarded(output[0], dtype=output[1]))
            slow.append(np.full(output[0], np.nan))
        else:
            fast.append(Guarded(output.shape, values=output, dtype=output.dtype))
            slow.append(to_float32(output).astype(np.float64))
    getattr(compiled, name)(*(guarded.array for guarded in fast), *inputs)
    widened = [
        to_float32(x).astype(np.float64)
        if isinstance(x, np.ndarray) and x.dtype in (FLOAT16, BFLOAT16, np.float32)
        else x
        for x in inputs
    ]
    getattr(reference, name)(*slow, *widened)
    for guarded, exact in zip(fast, slow, strict=True):
        guarded.assert_intact()
        actual = to_float32(guarded.array).astype(np.float64)
        rounding = ROUNDING[guarded.array.dtype.type] * np.abs(exact)
        allowed = tolerance * max(1.0, np.abs(exact).max(initial=0))
        assert (np.abs(actual - exact) <= 1.01 * rounding + allowed).all(), name
    return [guarded.array for guarded in fast]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "K", "N"), SHAPES)
def test_products_match_the_reference(dtype, M, K, N):
    random = np.random.default_rng(0)
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
def test_the_forward_pass_applies_gelu_to_the_rounded_preactivation(dtype, M, K, N):
    random = np.random.default_rng(0)
    a, b = half(normal(random, M, K), dtype), half(normal(random, K, N) / np.sqrt(K), dtype)
    activation, preactivation, again, dx = (np.zeros((M, N), dtype) for _ in range(4))
    compiled.matmul_gelu(activation, preactivation, a, b)
    compiled.gelu_backward(dx, again, preactivation, preactivation)
    np.testing.assert_array_equal(activation, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("R", "C"), [(1, 1), (5, 7), (65, 48), (130, 33)])
def test_kernels_of_rows_match_the_reference(dtype, R, C):
    random = np.random.default_rng(0)
    exact = np.float32
    x, dy = half(normal(random, R, C), dtype), half(normal(random, R, C), dtype)
    weight, bias, addend = (half(normal(random, *s), dtype) for s in ((C,), (C,), (R, C)))
    outputs = [((R, C), dtype), ((R,), exact), ((R,), exact)]
    for given in (bias, None):
        # One channel has no variance, only rounding errors.
        tolerance = 1e-5 if C > 1 else 2e-3
        _, mean, rstd = assert_half_close(
            "layernorm", outputs, x, weight, given, tolerance=tolerance
        )
    sums = [normal(random, C), normal(random, C)]
    if C > 1:
        assert_half_close(
            "layernorm_backward", [((R, C), dtype), *sums], dy, x, mean, rstd, weight, addend
        )
    assert_half_close("gelu", [((R, C), dtype)], x)
    assert_half_close("gelu_backward", [((R, C), dtype), ((R, C), dtype)], dy, x)
    assert_half_close("column_sum", [normal(random, C)], x)
    assert_half_close("dropout", [((R, C), dtype)], x, KEY, 0.3, addend)
    assert_half_close("dropout", [((R, C), dtype)], normal(random, R, C), KEY, 0.3, addend)
    logits, targets = normal(random, R, C), random.integers(0, C, R).astype(np.int32)
    losses, dlogits = np.empty(R, exact), np.empty((R, C), dtype)
    expected_losses, expected = np.empty(R), np.empty((R, C))
    reference.cross_entropy(expected_losses, expected, logits.astype(float), targets, 8.0)
    compiled.cross_entropy(losses, dlogits, logits, targets, 8.0)
    np.testing.assert_allclose(losses, expected_losses, atol=1e-5)
    np.testing.assert_allclose(to_float32(dlogits), expected, rtol=ROUNDING[dtype], atol=1e-5)
    logits, teacher_logits = normal(random, R, C), normal(random, R, C)
    others = (teacher_logits, targets, 0.6, 2.0, 8.0)
    slopes, expected_slopes = np.empty(R, exact), np.empty(R)
    reference.distillation(
        expected_losses, expected, expected_slopes, logits.astype(float), *others
    )
    compiled.distillation(losses, dlogits, slopes, logits, *others)
    np.testing.assert_allclose(losses, expected_losses, atol=1e-5)
    np.testing.assert_allclose(slopes, expected_slopes, atol=1e-5)
    np.testing.assert_allclose(to_float32(dlogits), expected, rtol=ROUNDING[dtype], atol=1e-5)
    indices = random.integers(0, C, (R, 1)).astype(np.int32)
    spread = half(normal(random, R, 2), FLOAT16)
    assert_half_close("top_k_logits", [((R, C), exact)], indices, spread)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_matches_the_reference(dtype):
    random = np.random.default_rng(0)
    B, T, C, V = 3, 7, 19, 11
    ids = random.integers(0, V, (B, T)).astype(np.int32)
    weight, position = half(normal(random, V, C), dtype), half(normal(random, T, C), dtype)
    for added in ((), (half(normal(random, B * T, C), dtype),), (position, np.array(0))):
        assert_half_close("embedding", [((B * T, C), dtype)], weight, ids, *added)
    dout = half(normal(random, B * T, C), dtype)
    sums = [normal(random, V, C), normal(random, T, C)]
    assert_half_close("embedding_backward", sums, dout, ids)
    assert_half_close("embedding_backward", sums[:1], None, dout, ids, tolerance=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "H", "T", "D"), [(1, 1, 1, 1), (2, 3, 7, 5), (2, 2, 65, 16), (1, 3, 130, 33)]
)
def test_attention_matches_the_reference(dtype, B, H, T, D):
    random = np.random.default_rng(0)
    # See test_attention_pairs.
    rounded = 2.0**-8 if dtype == BFLOAT16 and ISA.fast_bfloat16 else 0
    R, C = B * T, H * D
    qkv, dout = half(normal(random, R, 3 * C), dtype), half(normal(random, R, C), dtype)
    for dropout in ((), (KEY, 0.2)):
        outputs = [((R, C), dtype), ((B, H, T), np.float32)]
        out, logsumexp = assert_half_close(
            "attention", outputs, qkv, *dropout, tolerance=max(rounded, 1e-5)
        )
        assert_half_close(
            "attention_backward",
            [((R, 3 * C), dtype)],
            dout,
            out,
            logsumexp,
            qkv,
            *dropout,
            tolerance=max(rounded, 2e-5),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16, 37, 1000])
def test_adamw_rounds_the_parameters_into_the_working_copy(dtype, n):
    random = np.random.default_rng(0)
    coefficients = AdamWCoefficients(1e-2, 0.9, 0.99, 1e-8, 0.1, 2.0, 3.0, 0.5)
    start = [normal(random, n), normal(random, n), normal(random, n), normal(random, n) ** 2]
    plain, copied = ([x.copy() for x in start] for _ in range(2))
    compiled.adamw(*plain, n // 2, coefficients)
    working = Guarded((n,), dtype=dtype)
    compiled.adamw(*copied, n // 2, coefficients, working.array)
    working.assert_intact()
    for a, b in zip(plain, copied, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(working.array, round_to(copied[0], dtype))


# The left operand ends where a page begins that cannot be read.
AT_THE_END = """
import ctypes, mmap
import numpy as np
from smallmind.kernels import compiled
from smallmind.kernels.half import BFLOAT16

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
