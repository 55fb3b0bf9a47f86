"""The compiled kernels against the reference: awkward sizes, between guard values."""

import importlib
import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest

from smallmind.kernels import blas, compiled, linalg, reference
from smallmind.kernels.codegen.simd import LANES
from smallmind.kernels.description import KERNELS, described
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, to_float32
from smallmind.kernels.reference_optimizers import AdamWCoefficients
from tests.guards import Guarded
from tests.kernels.activations import ACTIVATIONS

SEED = 11

SIZES = (1, 3, 5, 63, 65, 129)  # test_sweep has all others
KEY = (0xABCD1234 << 32) + 0x9876FEDC
# Half a unit in the last place, relative.
ROUNDING = {np.dtype(np.float32): 0, np.dtype(FLOAT16): 2.0**-11, np.dtype(BFLOAT16): 2.0**-8}


def normal(random, *shape):
    return random.standard_normal(shape, dtype=np.float32)


def widen(x):
    """The numbers of an array in float64; everything else as it is."""
    is_float = isinstance(x, np.ndarray) and x.dtype in ROUNDING
    return to_float32(x).astype(np.float64) if is_float else x


def run_both(name, outputs, *inputs):
    """Runs both kernels on the same stored numbers.

    outputs are shapes, or pairs of shape and dtype, initially NaN; or arrays, which are changed.
    Returns the pairs (compiled, reference) of outputs. Inputs must stay unchanged.
    """
    fast, slow = [], []
    for output in outputs:
        if isinstance(output, tuple):
            shape, dtype = output if isinstance(output[0], tuple) else (output, np.float32)
            fast.append(Guarded(shape, dtype=dtype))
            slow.append(np.full(shape, np.nan))
        else:
            fast.append(Guarded(output.shape, output, output.dtype))
            slow.append(widen(output))
    copies = [x.copy() if isinstance(x, np.ndarray) else x for x in inputs]
    getattr(compiled, name)(*(guarded.array for guarded in fast), *inputs)
    getattr(reference, name)(*slow, *map(widen, copies))
    for guarded in fast:
        guarded.assert_intact()
    for copy, after in zip(copies, inputs, strict=True):
        np.testing.assert_array_equal(copy, after)
    return [(guarded.array, exact) for guarded, exact in zip(fast, slow, strict=True)]


def assert_close(pairs, tolerance=2e-6, min_scale=1e-3):
    """Compares the error of each output to its largest element, or to min_scale if larger.

    In 16 bits each number may be rounded once besides.
    """
    for actual, exact in pairs:
        allowed = tolerance * max(np.abs(exact).max(initial=0), min_scale)
        rounding = ROUNDING[actual.dtype]
        np.testing.assert_allclose(widen(actual), exact, rtol=1.01 * rounding, atol=allowed)


def assert_attention_matches(random, B, H, G, T, D, *mask, tolerances=(3e-6, 5e-6)):
    """Both passes of attention, where H heads of queries share G heads of keys and values."""
    R, C, W = B * T, H * D, (H + 2 * G) * D
    qkv, dout = normal(random, R, W), normal(random, R, C)
    pairs = run_both("attention", [(R, C), (B, H, T)], qkv, *mask)
    assert_close(pairs, tolerances[0])
    out, logsumexp = (exact.astype(np.float32) for _, exact in pairs)
    pairs = run_both("attention_backward", [(R, W)], dout, out, logsumexp, qkv, *mask)
    assert_close(pairs, tolerances[1])


def test_both_backends_have_the_same_kernels_with_the_same_arguments():
    for name in KERNELS:
        fast = inspect.signature(getattr(compiled, name))
        slow = inspect.signature(getattr(reference, name))
        assert fast == slow, name
        text = inspect.getdoc(getattr(reference, name))
        assert inspect.getdoc(getattr(compiled, name)).startswith(text), name


def test_every_kernel_with_a_plain_twin_is_described():
    folder = Path(reference.__file__).parent
    for path in (*folder.glob("*.py"), *folder.glob("attention/*.py")):
        name_of_module = ".".join(path.relative_to(folder).with_suffix("").parts)
        module = importlib.import_module(f"smallmind.kernels.{name_of_module}")
        for name, function in vars(module).items():
            is_own = inspect.isfunction(function) and function.__module__ == module.__name__
            is_own = is_own and not name.startswith("_")
            twin = getattr(reference, name, None)
            if is_own and twin and twin is not function and module not in (blas, linalg):
                assert KERNELS[name].module == name_of_module, name


def test_what_a_kernel_writes_is_described(random):
    """Its first arguments, whose names say so in its docstring."""
    for name, description in KERNELS.items():
        arguments = list(inspect.signature(getattr(reference, name)).parameters)
        text = inspect.getdoc(getattr(reference, name))
        for argument in arguments[: description.writes]:
            assert argument in text, (name, argument)
    assert described("my_own").gradient == "dy" and not described("my_own").temporary_bytes()


def assert_products_match(random, M, K, N, tolerance=2e-6):
    """Every kind of product, with and without what may be added."""
    a, b = normal(random, M, K), normal(random, K, N)
    a_t, b_t = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    bias, addend, out = normal(random, N), normal(random, M, N), (M, N)
    pairs = []
    for added in ((), (bias,), (bias, addend)):
        pairs += run_both("matmul", [out], a, b, *added)
    for added in ((), (addend,)):
        pairs += run_both("matmul_transpose_a", [out], a_t, b, *added)
        pairs += run_both("matmul_transpose_b", [out], a, b_t, *added)
    for added in ((), (bias,)):
        pairs += run_both("matmul_gelu", [out, out], a, b, *added)
    # Terms of size 1 may cancel: the error is relative to the terms, not to their sum.
    assert_close(pairs, tolerance, min_scale=max(1e-3, np.sqrt(K)))


PRODUCTS = {
    "without elements": [*itertools.product((0, 1, 40), repeat=3)],
    **{f"of {M} rows": [*itertools.product((M,), SIZES, SIZES)] for M in SIZES},
    # Over several blocks of depth; a transposed a is packed for wide b, or always.
    "deep": [*itertools.product((70,), (255, 256, 257, 511, 700), (65, 261))],
    "of several strips": [(1000, 33, 40), (1000, 33, 300)],
}


@pytest.mark.parametrize("shapes", PRODUCTS)
def test_products_match_the_reference(random, shapes):
    for shape in PRODUCTS[shapes]:
        assert_products_match(random, *shape)


def test_columns_of_a_product_do_not_depend_on_how_many_there_are(random):
    """Some CPUs pack a transposed a only for a wide b: the bits must be those of all others."""
    a, b = normal(random, 700, 100), normal(random, 700, 320)
    wide, narrow = np.empty((100, 320), np.float32), np.empty((100, 128), np.float32)
    compiled.matmul_transpose_a(wide, a, b)
    compiled.matmul_transpose_a(narrow, a, np.ascontiguousarray(b[:, :128]))
    np.testing.assert_array_equal(narrow, wide[:, :128])


def test_rows_of_a_large_matrix_give_the_bits_that_they_give_in_a_small_one(random):
    """A large one is read row by row, a small one four rows at a time."""
    N, step = 16_310, 3262
    a, b = normal(random, 1, 1030), normal(random, N, 1030)
    whole, parts = np.empty((2, 1, N), np.float32)
    compiled.matmul_transpose_b(whole, a, b)
    for j in range(0, N, step):
        part = np.empty((1, step), np.float32)
        compiled.matmul_transpose_b(part, a, b[j : j + step])
        parts[:, j : j + step] = part
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 37), (3, 2), (4, 33)])
def test_long_sums_of_products_with_few_rows_lose_no_digits(random, M, N):
    K = 300_000
    a, b = random.random((M, K), dtype=np.float32), random.random((K, N), dtype=np.float32)
    a_t, b_t = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    exact = a.astype(np.float64) @ b
    for name, operands in (
        ("matmul", (a, b)),
        ("matmul_transpose_a", (a_t, b)),
        ("matmul_transpose_b", (a, b_t)),
    ):
        out = np.empty((M, N), np.float32)
        getattr(compiled, name)(out, *operands)
        np.testing.assert_allclose(out, exact, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize(("name", "columns"), ACTIVATIONS.items())
def test_activations_have_the_same_bits_in_both_passes(random, name, columns):
    x, dy = normal(random, 37, 58), normal(random, 37, 58 // columns)
    dx, y, alone = np.empty_like(x), np.empty_like(dy), np.empty_like(dy)
    getattr(compiled, f"{name}_backward")(dx, y, dy, x)
    getattr(compiled, name)(alone, x)
    np.testing.assert_array_equal(y, alone)
    if name == "gelu":
        compiled.matmul_gelu(alone, np.empty_like(x), x, np.eye(58, dtype=np.float32))
        np.testing.assert_array_equal(y, alone)


@pytest.mark.parametrize("n", [1, 15, 8191, 8192, 8193, 30001])
def test_sum_of_squares_matches_the_reference(random, n):
    x = normal(random, n)
    # Also where the squares overflow float32, or vanish in it.
    for scale in (1, 1e25, 1e-25, 1e-41):
        scaled = x * np.float32(scale)
        expected = reference.sum_of_squares(scaled)
        assert np.isfinite(expected) and expected > 0
        assert compiled.sum_of_squares(scaled) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("V", [1, 5, 65, 1000])
@pytest.mark.parametrize("R", [1, 3, 65])
def test_cross_entropy_matches_the_reference(random, R, V):
    logits, targets = 5 * normal(random, R, V), random.integers(0, V, R).astype(np.int32)
    pairs = run_both("cross_entropy", [(R,), (R, V), logits], targets, 1 / R)[:2]
    assert_close(pairs, 1e-5)
    losses = np.empty(R, np.float32)
    compiled.cross_entropy(losses, logits, logits, targets, 1 / R)  # in place
    np.testing.assert_array_equal(logits, pairs[1][0])
    np.testing.assert_array_equal(losses, pairs[0][0])


@pytest.mark.parametrize("R", [1, 3, 65])
def test_losses_with_weights_match_the_reference(random, R):
    V, weights = 33, random.random(R).astype(np.float32) * (np.arange(R) % 3 > 0)
    targets = random.integers(0, V, R).astype(np.int32)
    logits, teacher = 5 * normal(random, R, V), 4 * normal(random, R, V)
    pairs = run_both("cross_entropy", [(R,), (R, V), logits], targets, 1 / R, weights)[:2]
    inputs = teacher, targets, 0.3, 2.0, 1 / R
    pairs += run_both("distillation", [(R,), (R, V), (R,), logits], *inputs, weights)[:3]
    assert_close(pairs, 1e-5)
    for found, _ in pairs:
        assert not found[weights == 0].any()
    ones = np.ones(R, np.float32)
    for name, outputs, given in (
        ("cross_entropy", [(R,), (R, V), logits], (targets, 1 / R)),
        ("distillation", [(R,), (R, V), (R,), logits], inputs),
    ):
        weighted, plain = run_both(name, outputs, *given, ones), run_both(name, outputs, *given)
        for (found, _), (expected, _) in zip(weighted, plain, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "logits", [[-1e10, 0, 200, 500], [3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], ids=str
)
def test_cross_entropy_is_exact_for_logits_of_very_different_sizes(logits):
    given = np.array([logits], np.float32)
    pairs = run_both("cross_entropy", [(1,), given.shape, given], np.array([0], np.int32), 1.0)
    assert_close(pairs[:2])


@pytest.mark.parametrize("V", [1, 5, 65, 1000])
@pytest.mark.parametrize("R", [1, 3, 65])
def test_distillation_matches_the_reference(random, R, V):
    targets = random.integers(0, V, R).astype(np.int32)
    for alpha, temperature in ((0.0, 1.0), (0.3, 2.0), (1.0, 0.7), (0.9, 10.0)):
        logits, teacher_logits = 5 * normal(random, R, V), 4 * normal(random, R, V)
        inputs = (teacher_logits, targets, alpha, temperature, 1 / R)
        pairs = run_both("distillation", [(R,), (R, V), (R,), logits], *inputs)[:3]
        # Terms of size 1 may cancel in losses and their slopes; temperature^2 of them in losses.
        assert_close(pairs[:1], 1e-5, min_scale=max(1, temperature**2))
        assert_close(pairs[1:2], 1e-5)
        assert_close(pairs[2:], 1e-5, min_scale=1)
        losses, dtemperatures = np.empty(R, np.float32), np.empty(R, np.float32)
        compiled.distillation(losses, logits, dtemperatures, logits, *inputs)  # in place
        for actual, (expected, _) in zip((losses, logits, dtemperatures), pairs, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_distillation_is_exact_if_the_teacher_is_close_to_the_student(random):
    teacher_logits = 5 * normal(random, 9, 65)
    logits = teacher_logits + np.float32(1e-2) * normal(random, 9, 65)
    outputs = [(9,), (9, 65), (9,), logits]
    pairs = run_both("distillation", outputs, teacher_logits, np.zeros(9, "i"), 1.0, 4.0, 1.0)
    # The loss is a ten-thousandth of its terms. With fewer lanes each of them adds more numbers.
    np.testing.assert_allclose(*pairs[0], atol=3e-6 if LANES > 4 else 5e-6)
    np.testing.assert_allclose(*pairs[1], atol=3e-6)
    np.testing.assert_allclose(*pairs[2], atol=3e-6)


def test_distillation_is_exact_for_logits_of_very_different_sizes():
    logits = np.array([[-1e4, 0, 200, 500]], np.float32)
    for teacher_logits in (logits[:, ::-1].copy(), logits):
        inputs = (teacher_logits, np.array([0], np.int32), 0.5, 2.0, 1.0)
        assert_close(run_both("distillation", [(1,), (1, 4), (1,), logits], *inputs)[:3])


@pytest.mark.parametrize(("V", "K"), [(1, 1), (5, 3), (65, 16), (130, 130)])
def test_top_k_logits_matches_the_reference(random, V, K):
    R = 67
    indices = np.argsort(random.random((R, V)), axis=1)[:, :K].astype(np.int32)
    log_probabilities = normal(random, R, K + 1)
    pairs = run_both("top_k_logits", [(R, V)], indices, log_probabilities)
    np.testing.assert_array_equal(*pairs[0])


def test_attention_is_exact_for_scores_of_very_different_sizes(random):
    T, D = 5, 4
    qkv = normal(random, T, 3 * D)
    qkv[0, D : 2 * D] = -1e11 * qkv[3, :D]
    assert_close(run_both("attention", [(T, D), (1, 1, T)], qkv))


def attention_of(qkv, dout, shape, *mask):
    """Both compiled passes of attention -> out, logsumexp, dqkv."""
    out, dqkv = (Guarded(x.shape, dtype=x.dtype) for x in (dout, qkv))
    logsumexp = Guarded(shape)
    compiled.attention(out.array, logsumexp.array, qkv, *mask)
    compiled.attention_backward(dqkv.array, dout, out.array, logsumexp.array, qkv, *mask)
    for guarded in (out, logsumexp, dqkv):
        guarded.assert_intact()
    return to_float32(out.array), logsumexp.array, to_float32(dqkv.array)


ATTENTION = [  # of each head its own keys and values, and of several heads the same
    *((1, 1, 1, 1, 1), (2, 3, 3, 5, 7), (3, 2, 2, 16, 4), (1, 3, 3, 17, 20), (2, 2, 2, 31, 33)),
    *((2, 1, 1, 32, 64), (2, 1, 1, 33, 8), (1, 2, 2, 64, 32), (2, 2, 2, 65, 16)),
    *((1, 2, 2, 129, 33), (1, 1, 1, 200, 80)),
    *((2, 2, 1, 3, 3), (2, 6, 2, 20, 5), (1, 6, 2, 64, 5), (2, 4, 1, 65, 16)),
    *((1, 4, 2, 129, 33), (3, 3, 1, 1, 1)),
]


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize(("B", "H", "G", "T", "D"), ATTENTION)
def test_attention_matches_the_reference(random, B, H, G, T, D, probability):
    dropout = KEY, probability, 5 * T  # of the sequences from the sixth of a batch on
    for scale in (None, 0.9):
        assert_attention_matches(random, B, H, G, T, D, *dropout, None, scale)


@pytest.mark.parametrize("kernels", [compiled, reference], ids=["compiled", "reference"])
def test_attention_gradients_are_exact_for_scores_in_the_thousands(random, kernels):
    B, H, T, D = 2, 2, 33, 16
    qkv, dout = 16 * normal(random, B * T, 3 * H * D), normal(random, B * T, H * D)
    results = []
    for backend, dtype in ((kernels, np.float32), (reference, np.float64)):
        arrays = qkv.astype(dtype), dout.astype(dtype)
        out, logsumexp = np.empty(dout.shape, dtype), np.empty((B, H, T), dtype)
        dqkv = np.empty(qkv.shape, dtype)
        backend.attention(out, logsumexp, arrays[0])
        backend.attention_backward(dqkv, arrays[1], out, logsumexp, arrays[0])
        results.append(np.split(dqkv, 3, axis=1))
    assert logsumexp.max() > 1000
    for actual, exact in zip(*results, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=5e-5 * np.abs(exact).max())


@pytest.mark.parametrize("beta2", [0.9, 0.999, 0.99999, 0.99999999])
def test_adamw_keeps_precision_for_beta2_close_to_1(random, beta2):
    p, g, m, v = normal(random, 20), normal(random, 20), np.zeros(20, "f"), np.zeros(20, "f")
    bias2 = 1 / (1 - beta2)
    coefficients = AdamWCoefficients(1e-2, 0.9, beta2, 1e-8, 0.1, 10.0, bias2, 1.0)
    pairs = run_both("adamw", [p, g, m, v], 20, coefficients)
    assert_close(pairs)
    np.testing.assert_allclose(*pairs[3], rtol=1e-6)


@pytest.mark.parametrize("n", [1, 16, 1000])
def test_adamw_clips_each_element_of_the_scaled_gradient(random, n):
    p, m = (normal(random, n) for _ in range(2))
    g, v = 100 * normal(random, n), np.abs(normal(random, n))
    settings = (1e-2, 0.0, 0.99, 1e-8, 0.1, 2.0, 3.0, 0.01)
    pairs = run_both("adamw", [p, g, m, v], n, AdamWCoefficients(*settings, max_gradient=0.5))
    assert_close(pairs)
    # With beta1 = 0 the first moment is the clipped gradient itself.
    np.testing.assert_allclose(pairs[2][0], np.clip(0.01 * g, -0.5, 0.5), rtol=1e-6)
