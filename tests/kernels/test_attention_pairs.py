"""Attention in bfloat16: where it is multiplied in pairs, probabilities are rounded."""

import numpy as np
import pytest

from smallmind.kernels import reference
from smallmind.kernels.number_types import BFLOAT16, round_to, to_float32
from tests.kernels.test_compiled import KEY, attention_of

SEED = 0


def bfloat16(random, *shape):
    values = random.standard_normal(shape).astype(np.float32)
    return np.ascontiguousarray(round_to(values, BFLOAT16))


def document_firsts(random, B, T):
    """Documents of a dozen tokens on average."""
    starts = random.random((B, T)) < 1 / 12
    starts[:, 0] = True
    return np.maximum.accumulate(np.where(starts, np.arange(T), 0), axis=1).astype(np.int32)


def run_exactly(qkv, dout, shape, *mask):
    qkv, dout = (to_float32(x).astype(np.float64) for x in (qkv, dout))
    out, logsumexp, dqkv = np.empty(dout.shape), np.empty(shape), np.empty(qkv.shape)
    reference.attention(out, logsumexp, qkv, *mask)
    reference.attention_backward(dqkv, dout, out, logsumexp, qkv, *mask)
    return out, logsumexp, dqkv


def assert_rounded(found, exact, allowed):
    """All numbers are off by no more than some roundings to 8 bits of the largest."""
    np.testing.assert_allclose(found, exact, rtol=0, atol=allowed * np.abs(exact).max())
    assert np.sqrt(np.mean((found - exact) ** 2)) <= allowed * np.sqrt(np.mean(exact**2))


SIZES = [*range(1, 20), 31, 32, 33, 47, 63, 64, 65, 81, 95, 96, 97, 127, 128, 129, 130, 193, 321]


@pytest.mark.parametrize("D", [1, 3, 8, 20, 32, 33, 64, 80, 128])
def test_attention_of_every_size_matches_the_reference(random, D):
    for number, T in enumerate(SIZES if D in (3, 20, 32, 33) else SIZES[D % 7 :: 4]):
        H, G = [(2, 2), (4, 2), (3, 1)][number % 3]
        B, probability = 2, [0.0, 0.2][number // 3 % 2]
        firsts = None if number % 2 else document_firsts(random, B, T)
        qkv, dout = bfloat16(random, B * T, (H + 2 * G) * D), bfloat16(random, B * T, H * D)
        inputs = qkv, dout, (B, H, T), KEY, probability, 5 * T, firsts
        (out, logsumexp, dqkv), exact = attention_of(*inputs), run_exactly(*inputs)
        assert_rounded(out, exact[0], 2.0**-7)
        np.testing.assert_allclose(logsumexp, exact[1], rtol=2e-6, atol=2e-6)
        assert_rounded(dqkv, exact[2], 2.0**-6)


def test_attention_is_exact_where_nothing_is_rounded(random):
    """Scores of zero, and a power of two of values that are small integers."""
    T, D = 64, 32
    qkv = np.zeros((T, 3 * D), np.float32)
    qkv[:, 2 * D :] = random.integers(-8, 9, (T, D))
    dout = np.zeros((T, D), np.float32)
    out, logsumexp, _ = attention_of(
        *(np.ascontiguousarray(round_to(x, BFLOAT16)) for x in (qkv, dout)), (1, 1, T)
    )
    means = np.cumsum(qkv[:, 2 * D :], axis=0) / np.arange(1, T + 1)[:, None]
    np.testing.assert_allclose(logsumexp[0, 0], np.log(np.arange(1, T + 1)), rtol=1e-6)
    for t in (0, 1, 3, 7, 15, 31, 63):
        np.testing.assert_array_equal(out[t], to_float32(round_to(means[t], BFLOAT16)))


@pytest.mark.parametrize(("T", "D"), [(64, 32), (300, 64)])
def test_errors_are_not_larger_than_those_of_pytorch(random, T, D):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    B, H = 2, 4
    qkv, dout = bfloat16(random, B * T, 3 * H * D), bfloat16(random, B * T, H * D)
    exact = run_exactly(qkv, dout, (B, H, T))
    ours = attention_of(qkv, dout, (B, H, T))
    tensor = torch.from_numpy(qkv).view(torch.bfloat16).requires_grad_()
    heads = tensor.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind()
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    out = out.transpose(1, 2).reshape(B * T, H * D)
    out.backward(torch.from_numpy(dout).view(torch.bfloat16))

    def error(found, exact):
        return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))

    theirs = (x.detach().float().numpy() for x in (out, tensor.grad))
    for our, their, true in zip(ours[::2], theirs, exact[::2], strict=True):
        assert error(our, true) <= 1.5 * error(their, true)
