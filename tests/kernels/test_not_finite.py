"""NaN and infinity reach the output, as in plain NumPy, and spread no further."""

import itertools

import numpy as np
import pytest

from smallmind.kernels import cases, compiled, reference
from smallmind.kernels.description import KERNELS, described
from smallmind.kernels.number_types import BFLOAT16, round_to, to_float32
from smallmind.kernels.reference_optimizers import AdamWCoefficients
from tests.kernels.test_compiled import normal

SEED = 7

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
VALUES = [np.nan, np.inf, -np.inf]


def assert_same_kinds(name, outputs, *inputs, added=()):
    """Both backends have NaN, inf and -inf at the same places of their outputs, at least one.

    outputs are shapes, initially zeros, or arrays that are changed.
    """
    starts = [np.zeros(x, np.float32) if isinstance(x, tuple) else x for x in outputs]
    fast, slow = ([x.copy() for x in (*starts, *added)] for _ in range(2))
    getattr(compiled, name)(*fast, *inputs)
    getattr(reference, name)(*slow, *inputs)
    for actual, expected in zip(fast, slow, strict=True):
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(kind(actual), kind(expected), name)
    assert not all(np.isfinite(output).all() for output in fast), name


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("M", "K", "N"), [(1, 40, 37), (3, 40, 37), (70, 65, 130)])
def test_non_finite_values_pass_through_products(random, M, K, N, value):
    for operand in range(2):
        a, b = normal(random, M, K), normal(random, K, N)
        (a, b)[operand][-1, -1] = value
        a_t, b_t = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
        assert_same_kinds("matmul", [(M, N)], a, b)
        assert_same_kinds("matmul_gelu", [(M, N), (M, N)], a, b)
        assert_same_kinds("matmul_transpose_a", [(M, N)], a_t, b)
        assert_same_kinds("matmul_transpose_b", [(M, N)], a, b_t)
    for extra in ("bias", "addend"):
        x = normal(random, *((N,) if extra == "bias" else (M, N)))
        x[..., -1] = value
        out = np.zeros((M, N), np.float32)
        compiled.matmul(out, normal(random, M, K), normal(random, K, N), **{extra: x})
        assert not np.isfinite(out[..., -1]).any()
        assert np.isfinite(out[..., :-1]).all()


@pytest.mark.parametrize("name", KERNELS)
def test_non_finite_values_pass_through_every_kernel(name):
    """In each input; of a backward pass, in its gradients: what it kept belongs to other inputs."""
    about = described(name).arguments
    forward = described(about.after).arguments.arrays if about.after else {}
    case = cases.Case(name, list(cases.awkward(name))[3], cases.types(name)[0], optional=True)
    for (key, array), value in itertools.product(about.arrays.items(), VALUES):
        x = case.arguments[key]
        is_input = key not in case.names or array.is_read
        if array.dims and x.dtype == np.float32 and is_input and key not in forward:
            case.restore()
            last = x.reshape(-1)[-1:]
            before, last[...] = last.copy(), value
            exact = case.widened(np.float32)
            returned = getattr(reference, name)(*exact.values())
            for output, found in case.outputs(case.run()).items():
                expected = exact.get(output, returned)
                for kind in (np.isnan, np.isposinf, np.isneginf):
                    np.testing.assert_array_equal(kind(found), kind(expected), f"{key} {output}")
            last[...] = before


@pytest.mark.parametrize("value", VALUES)
def test_non_finite_values_pass_through_backward_passes_of_norms(random, value):
    R, C = 9, 37
    x, dy, weight = normal(random, R, C), normal(random, R, C), normal(random, C)
    x[3, -1] = value
    mean, rstd = np.zeros(R, np.float32), np.ones(R, np.float32)
    assert_same_kinds("layernorm_backward", [(R, C), (C,), (C,)], dy, x, mean, rstd, weight)
    assert_same_kinds("rmsnorm_backward", [(R, C), (C,)], dy, x, rstd, weight)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("C", [5, 16, 37])
def test_non_finite_logits_spoil_only_their_row_in_distillation(random, C, value):
    R = 9
    for place in ((3, 0), (3, 1), (3, C - 1)):  # the target, and others
        for spoilt in range(2):
            logits, teacher_logits = normal(random, R, C), normal(random, R, C)
            (logits, teacher_logits)[spoilt][place] = value
            losses, dlogits, dtemperatures = (np.zeros_like(logits) for _ in range(3))
            for backend in (compiled, reference):
                outputs = (losses[:, 0].copy(), dlogits, dtemperatures[:, 0].copy())
                targets = np.zeros(R, np.int32)
                inputs = (logits.copy(), teacher_logits, targets, 0.5, 2.0, 1.0)
                backend.distillation(*outputs, *inputs)
                assert not np.isfinite(outputs[0][3])
                for output in outputs:
                    assert np.isfinite(np.delete(output, 3, axis=0)).all()
                if value != -np.inf:  # a probability of zero
                    assert np.isnan(dlogits[3]).any()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("n", [5, 40, 9000])
def test_non_finite_values_pass_through_vector_kernels(random, n, value):
    for spoilt in range(2):
        vectors = [normal(random, n), normal(random, n), np.ones(n, "f"), np.ones(n, "f")]
        vectors[spoilt][-1] = value
        coefficients = AdamWCoefficients(1e-2, 0.9, 0.99, 1e-8, 0.1, 2.0, 3.0, 0.5)
        assert_same_kinds("adamw", [], n, coefficients, added=vectors)
        if np.isnan(value):  # NaN must not be clipped to a number
            clipping = coefficients._replace(max_gradient=0.1)
            assert_same_kinds("adamw", [], n, clipping, added=vectors)
    x = normal(random, n)
    x[-1] = value
    assert compiled.sum_of_squares(x) == pytest.approx(float(value) ** 2, nan_ok=True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize(("T", "D"), [(7, 5), (70, 32)])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_non_finite_values_spoil_no_other_head_or_sequence_in_attention(
    random, T, D, part, value, dtype
):
    B, H, b, h, t = 2, 2, 1, 0, T // 2
    C = H * D
    qkv, dout = normal(random, B * T, 3 * C), normal(random, B * T, C)
    qkv[:, h * D] = np.abs(qkv[:, h * D])  # so that an infinite key has no score of -inf
    column = ["query", "key", "value"].index(part) * C + h * D
    qkv[b * T + t, column] = value
    qkv, dout = round_to(qkv, dtype), round_to(dout, dtype)
    out, sums = np.zeros((B * T, C), dtype), np.zeros((B, H, T), np.float32)
    compiled.attention(out, sums, qkv)
    dqkv = np.zeros_like(qkv)
    compiled.attention_backward(dqkv, dout, out, sums, qkv)
    out, dqkv = to_float32(out), to_float32(dqkv)
    heads = out.reshape(B, T, H, D)
    assert not np.isfinite(heads[b, t, h]).all()
    if part != "query":
        assert not np.isfinite(heads[b, t:, h]).all(axis=-1).any()
    gradients = dqkv.reshape(B, T, 3, H, D)
    assert not np.isfinite(gradients[b, :, :, h]).all()
    heads[b, :, h], gradients[b, :, :, h] = 0, 0
    assert np.isfinite(heads).all()
    assert np.isfinite(gradients).all()
