"""The kernels of the architecture's parts: gradients, awkward sizes, 16 bits, in place, columns."""

import itertools

import numpy as np
import pytest

from smallmind.kernels import compiled, reference
from smallmind.kernels.half import BFLOAT16, FLOAT16
from tests.gradcheck import assert_gradients
from tests.kernels.test_compiled import ROWS_AND_CHANNELS, assert_close, normal, run_both
from tests.kernels.test_half import assert_half_close, half
from tests.kernels.test_not_finite import VALUES, assert_same_kinds

SEED = 5

KEY = (0x1234 << 32) + 0x5678


HEADS = [*itertools.product((1, 3, 65), (1, 2, 5), (1, 3, 5, 16, 33))]


@pytest.mark.parametrize(("R", "C"), ROWS_AND_CHANNELS)
def test_rmsnorm_matches_the_reference(random, R, C):
    x, weight = normal(random, R, C), normal(random, C)
    for epsilon in (0.1, 1e-5):
        pairs = run_both("rmsnorm", [(R, C), (R,)], x, weight, epsilon)
        assert_close(pairs, 3e-6)
    rstd, dy, dweight = pairs[1][1].astype(np.float32), normal(random, R, C), normal(random, C)
    for addend in (normal(random, R, C), None):
        inputs = dy, x, rstd, weight, addend
        # One channel is always 1 or -1: the terms of its gradient cancel.
        assert_close(run_both("rmsnorm_backward", [(R, C), dweight], *inputs), 1e-5, min_scale=1)


@pytest.mark.parametrize(("R", "H", "D"), HEADS)
def test_norm_heads_matches_the_reference(random, R, H, D):
    for G, extra in ((H, 0), (1, D + 1)):
        n, gains = (H + G) * D, (normal(random, D), normal(random, D))
        x = normal(random, R, n + extra)  # whose other columns stay
        windows = 5 if R == 65 else 1  # which begin anew within a block of rows
        for T, theta, start in ((R, None, None), (R // windows, 1e4, np.array(2)), (1, 1e2, None)):
            outputs = [x.copy(), (R, n), (R, H + G)]
            pairs = run_both("norm_heads", outputs, *gains, H, T, theta, start, 0, 1e-3)
            assert_close(pairs, 3e-6)
            np.testing.assert_array_equal(pairs[1][0], x[:, :n])
            kept, rstd = (pair[1].astype(np.float32) for pair in pairs[1:])
            outputs = [normal(random, R, n + extra), normal(random, D), normal(random, D)]
            pairs = run_both("norm_heads_backward", outputs, kept, rstd, *gains, H, T, theta)
            assert_close(pairs, 1e-5, min_scale=1)


@pytest.mark.parametrize("D", [4, 5])
def test_norm_heads_is_the_norm_of_each_head_and_a_rotation(random, D):
    R, H, G = 6, 3, 2
    x = normal(random, R, (H + G) * D)
    gains = np.float32(2) + normal(random, 2, D)
    expected, rstd = np.empty_like(x), np.empty(R * (H + G), np.float32)
    rows = x.reshape(-1, D)
    compiled.rmsnorm(expected.reshape(rows.shape), rstd, rows, np.ones(D, np.float32))
    expected *= np.concatenate((np.tile(gains[0], H), np.tile(gains[1], G)))
    compiled.rope(expected, 1e4, 3, H + G, D, np.array(1))
    y, kept, rstd = x.copy(), np.empty_like(x), np.empty((R, H + G), np.float32)
    compiled.norm_heads(y, kept, rstd, *gains, H, 3, 1e4, np.array(1))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("R", "H", "D"), HEADS)
def test_rope_matches_the_reference_and_its_inverse_restores(random, R, H, D):
    x = normal(random, R, H * D + 3)
    for T, start in ((R, 2), (1, 0)):
        for inverse in (False, True):
            arguments = 1e4, T, H, D, np.array(start), 0, inverse
            assert_close(run_both("rope", [x], *arguments))
    turned = x.copy()
    compiled.rope(turned, 1e4, R, H, D)
    compiled.rope(turned, 1e4, R, H, D, inverse=True)
    np.testing.assert_allclose(turned, x, atol=1e-6)


@pytest.mark.parametrize(("R", "C"), ROWS_AND_CHANNELS)
def test_activations_and_sums_match_the_reference(random, R, C):
    x, dy, wide = 3 * normal(random, R, C), normal(random, R, C), 3 * normal(random, R, 2 * C)
    assert_close(run_both("relu2", [(R, C)], x))
    assert_close(run_both("relu2_backward", [(R, C), (R, C)], dy, x))
    assert_close(run_both("swiglu", [(R, C)], wide))
    assert_close(run_both("swiglu_backward", [(R, 2 * C), (R, C)], dy, wide))
    assert_close(run_both("softcap", [(R, C)], x, 1.5))
    y = np.tanh(x)
    assert_close(run_both("softcap_backward", [(R, C)], dy, y, 1.5))
    weights = normal(random, 2)
    for first, width in ((0, C), (3, C + 5)):
        start = normal(random, R, width)
        assert_close(run_both("copy_columns", [(R, C)], normal(random, R, width), first))
        assert_close(run_both("mix", [start], x, dy, weights, first))
        outputs = [start, normal(random, R, C), normal(random, 2)]
        assert_close(
            run_both("mix_backward", outputs, x, dy, weights, first), 2e-6 * np.sqrt(R * C)
        )


@pytest.mark.parametrize("C", [1, 16, 45])
@pytest.mark.parametrize(("B", "T", "start"), [(1, 1, 9), (3, 1, 0), (1, 40, 3), (5, 7, 2)])
def test_rows_of_positions_are_added_from_a_start_on(random, B, T, start, C):
    ids = random.integers(0, 6, (B, T)).astype(np.int32)
    arguments = normal(random, 6, C), ids, normal(random, start + T + 1, C), np.array(start)
    ((fast, slow),) = run_both("embedding", [(B * T, C)], *arguments)
    np.testing.assert_array_equal(fast, slow.astype(np.float32))
    expected = arguments[0][ids] + arguments[2][start : start + T]
    np.testing.assert_array_equal(fast, expected.reshape(B * T, C))


@pytest.mark.parametrize("kernels", [compiled, reference], ids=["compiled", "reference"])
def test_pairs_and_documents_continue_where_the_last_ids_ended(random, kernels):
    ids = random.integers(0, 4, (3, 30)).astype(np.int32)
    rows, firsts = np.empty_like(ids), np.empty_like(ids)
    kernels.bigrams(rows, ids, 4, 16, 3)
    kernels.document_starts(firsts, ids, 3)
    before, begun, begin = np.zeros(3, np.int32), np.zeros(3, np.int32), 0
    for count in (1, 1, 12, 1, 15):
        part = ids[:, begin : begin + count].copy()
        found = np.empty_like(part)
        kernels.bigrams(found, part, 4, 16, 3, before)
        np.testing.assert_array_equal(found, rows[:, begin : begin + count])
        kernels.document_starts(found, part, 3, begun, np.array(begin))
        np.testing.assert_array_equal(found, firsts[:, begin : begin + count])
        begin += count
        np.testing.assert_array_equal(begun, firsts[:, begin - 1])
        before = part[:, -1].copy()


@pytest.mark.parametrize(("V", "count"), [(1, 1), (5, 25), (7, 48), (300, 2**14), (2**24, 2**24)])
def test_bigrams_match_the_reference(random, V, count):
    ids = random.integers(0, V, (3, 43)).astype(np.int32)
    ids[0, :2] = V - 1
    fast, slow = np.full(ids.shape, -1, np.int32), np.full(ids.shape, -1, np.int32)
    for token in (-1, V - 1):
        compiled.bigrams(fast, ids, V, count, token)
        reference.bigrams(slow, ids, V, count, token)
        np.testing.assert_array_equal(fast, slow)
        assert fast.min() >= 0 and fast.max() < count
        begins = ids == token
        begins[:, 0] = True
        alone = np.empty((begins.sum(), 1), np.int32)
        compiled.bigrams(alone, ids[begins][:, None].copy(), V, count, -1)
        np.testing.assert_array_equal(fast[begins], alone[:, 0])
    compiled.bigrams(fast, ids, V, count, -1)
    if count == V**2:
        np.testing.assert_array_equal(fast[:, 1:], V * ids[:, :-1] + ids[:, 1:])
    elif V > 7:
        assert len(set(fast.flat)) > 0.9 * ids.size  # hardly any share a row


def test_what_may_be_overwritten_gives_the_same_bits(random):
    R, C = 37, 29
    x, dy, wide = normal(random, R, C), normal(random, R, C), normal(random, R, 2 * C)
    for name, inputs in (("relu2", (dy, x)), ("swiglu", (dy, wide))):
        dx, y = np.empty_like(inputs[1]), np.empty_like(dy)
        backward = getattr(compiled, f"{name}_backward")
        backward(dx, y, *inputs)
        alone = np.empty_like(y)
        getattr(compiled, name)(alone, inputs[1])
        np.testing.assert_array_equal(y, alone)
        first, second = inputs[0].copy(), inputs[1].copy()
        backward(second, first, first, second)
        np.testing.assert_array_equal(second, dx)
        np.testing.assert_array_equal(first, y)
    dx, in_place = np.empty_like(dy), dy.copy()
    compiled.softcap_backward(dx, dy, x, 2.0)
    compiled.softcap_backward(in_place, in_place, x, 2.0)
    np.testing.assert_array_equal(in_place, dx)
    y, in_place = np.empty_like(x), x.copy()
    compiled.softcap(y, x, 2.0)
    compiled.softcap(in_place, in_place, 2.0)
    np.testing.assert_array_equal(in_place, y)
    rstd, weight, ids = np.empty(R, np.float32), normal(random, C), np.zeros((1, R), np.int32)
    compiled.rmsnorm(y, rstd, x, weight)
    for inputs in ((dy, x, rstd, weight), (dy, x, rstd, weight, x)):
        compiled.rmsnorm_backward(dx, np.zeros(C, np.float32), *inputs)
        if len(inputs) == 4:
            in_place = dy.copy()
            inputs = (in_place, *inputs[1:])
        else:
            in_place = x.copy()
            inputs = (*inputs[:-1], in_place)
        compiled.rmsnorm_backward(in_place, np.zeros(C, np.float32), *inputs)
        np.testing.assert_array_equal(in_place, dx)
    out, in_place = np.empty_like(x), x.copy()
    compiled.embedding(out, dy, ids, x)
    compiled.embedding(in_place, dy, ids, in_place)
    np.testing.assert_array_equal(in_place, out)


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize(
    ("B", "H", "G", "T", "D"),
    [
        (2, 2, 1, 3, 3),
        (2, 6, 2, 20, 5),
        (1, 6, 2, 64, 5),
        (2, 4, 1, 65, 16),
        (1, 4, 2, 129, 33),
        (3, 3, 1, 1, 1),
    ],
)
def test_grouped_query_attention_matches_the_reference(random, B, H, G, T, D, probability):
    R, C, W = B * T, H * D, (H + 2 * G) * D
    dropout = KEY, probability, 5 * T
    qkv, dout = normal(random, R, W), normal(random, R, C)
    pairs = run_both("attention", [(R, C), (B, H, T)], qkv, *dropout)
    assert_close(pairs, 3e-6)
    out, logsumexp = (exact.astype(np.float32) for _, exact in pairs)
    pairs = run_both("attention_backward", [(R, W)], dout, out, logsumexp, qkv, *dropout)
    assert_close(pairs, 5e-6)


def test_shared_keys_and_values_equal_repeated_ones(random):
    B, H, G, T, D = 2, 4, 2, 33, 8
    qkv = normal(random, B * T, (H + 2 * G) * D)
    parts = np.split(qkv.reshape(B * T, -1, D), (H, H + G), axis=1)
    repeated = [parts[0], *(part.repeat(H // G, axis=1) for part in parts[1:])]
    repeated = np.ascontiguousarray(np.concatenate(repeated, axis=1).reshape(B * T, -1))
    outs = []
    for matrix in (qkv, repeated):
        out, logsumexp = np.empty((B * T, H * D), "f"), np.empty((B, H, T), "f")
        compiled.attention(out, logsumexp, matrix)
        outs.append(out)
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("R", "C"), [(1, 1), (5, 7), (65, 48), (130, 33)])
def test_kernels_in_16_bits_match_the_reference(dtype, R, C):
    random = np.random.default_rng(0)
    x, dy = half(normal(random, R, C), dtype), half(normal(random, R, C), dtype)
    wide, weight = half(normal(random, R, 2 * C), dtype), half(normal(random, C), dtype)
    out = (R, C), dtype
    _, rstd = assert_half_close("rmsnorm", [out, ((R,), np.float32)], x, weight)
    sums = normal(random, C)
    assert_half_close("rmsnorm_backward", [out, sums], dy, x, rstd, weight, x, tolerance=1e-5)
    heads, gains = (out, ((R, 2), np.float32)), (weight, half(normal(random, C), dtype))
    outputs = [wide.copy(), ((R, 2 * C), dtype), heads[1]]
    _, kept, rstd = assert_half_close("norm_heads", outputs, *gains, 1, R, 1e4)
    outputs = [wide.copy(), sums, sums.copy()]
    arguments = kept, rstd, *gains, 1, R, 1e4
    assert_half_close("norm_heads_backward", outputs, *arguments, tolerance=1e-5)
    assert_half_close("relu2", [out], x)
    assert_half_close("relu2_backward", [out, out], dy, x)
    assert_half_close("swiglu", [out], wide)
    assert_half_close("swiglu_backward", [((R, 2 * C), dtype), out], dy, wide)
    assert_half_close("copy_columns", [out], wide, C)
    assert_half_close("mix", [out], x, dy, half(normal(random, 2), dtype))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("C", [5, 16, 37])
def test_non_finite_values_pass_through(random, C, value):
    R = 9
    clean, spoilt, weight = normal(random, R, C), normal(random, R, C), normal(random, C)
    spoilt[3, -1] = value
    assert_same_kinds("rmsnorm", [(R, C), (R,)], spoilt, weight)
    rstd, weights = np.ones(R, np.float32), np.ones(2, np.float32)
    outputs = [np.concatenate((clean, spoilt), axis=1), (R, 2 * C), (R, 2)]
    assert_same_kinds("norm_heads", outputs, weight, weight, 1, R)
    for dy, x in ((clean, spoilt), (spoilt, clean)):
        assert_same_kinds("rmsnorm_backward", [(R, C), (C,)], dy, x, rstd, weight)
        assert_same_kinds("relu2_backward", [(R, C), (R, C)], dy, np.abs(x))
        assert_same_kinds("mix", [(R, C)], dy, x, weights)
    assert_same_kinds("swiglu", [(R, C)], np.concatenate((clean, spoilt), axis=1))
    if np.isnan(value):
        assert_same_kinds("relu2", [(R, C)], spoilt)
        assert_same_kinds("softcap", [(R, C)], spoilt, 2.0)


# Gradients of the twins, in float64.


def output(name, shape, *inputs):
    """The kernel's first output, of this shape; others are discarded."""
    out = np.zeros(shape)
    extra = [np.zeros(shape[0])] if name == "rmsnorm" else []
    getattr(reference, name)(out, *extra, *inputs)
    return (out, *extra)


def test_gradients_of_rmsnorm_match_finite_differences(random):
    x, weight, u = (random.standard_normal(s) for s in ((4, 6), (6,), (4, 6)))
    _, rstd = output("rmsnorm", (4, 6), x, weight)
    dx, dweight = u.copy(), np.zeros(6)
    reference.rmsnorm_backward(dx, dweight, dx, x, rstd, weight)

    def f(x, weight):
        return float((output("rmsnorm", (4, 6), x, weight)[0] * u).sum())

    assert_gradients(f, [dx, dweight], [x, weight])


@pytest.mark.parametrize("theta", [None, 1e4])
@pytest.mark.parametrize("D", [3, 4])
def test_gradients_of_norm_heads_match_finite_differences(random, D, theta):
    R, H, G, T = 6, 2, 1, 3
    x, u = random.standard_normal((2, R, (H + 2 * G) * D))
    gains = random.standard_normal((2, D))
    n, rotation = (H + G) * D, () if theta is None else (theta,)

    def forward(x, gains):
        y, kept, rstd = x.copy(), np.empty((R, n)), np.empty((R, H + G))
        reference.norm_heads(y, kept, rstd, *gains, H, T, *rotation)
        return y, kept, rstd

    _, *kept = forward(x, gains)
    dx, dgains = u.copy(), np.zeros((2, D))
    reference.norm_heads_backward(dx, *dgains, *kept, *gains, H, T, *rotation)
    assert_gradients(lambda x, g: float((forward(x, g)[0] * u).sum()), [dx, dgains], [x, gains])


@pytest.mark.parametrize("name", ["relu2", "swiglu"])
def test_gradients_of_activations_match_finite_differences(random, name):
    x, u = random.standard_normal((4, 6)), random.standard_normal((4, 6 if name == "relu2" else 3))
    dx, y = np.zeros_like(x), np.zeros_like(u)
    getattr(reference, f"{name}_backward")(dx, y, u, x)
    np.testing.assert_allclose(y, output(name, u.shape, x)[0], rtol=1e-14)
    assert_gradients(lambda x: float((output(name, u.shape, x)[0] * u).sum()), [dx], [x])


def test_gradient_of_softcap_matches_finite_differences(random):
    x, u = 3 * random.standard_normal((4, 6)), random.standard_normal((4, 6))
    dx = np.zeros_like(x)
    reference.softcap_backward(dx, u, output("softcap", (4, 6), x, 2.0)[0], 2.0)
    assert_gradients(lambda x: float((output("softcap", (4, 6), x, 2.0)[0] * u).sum()), [dx], [x])


@pytest.mark.parametrize(("first", "width"), [(0, 5), (2, 9)])
def test_gradients_of_mix_match_finite_differences(random, first, width):
    shapes = (4, 5), (4, 5), (2,), (4, width)
    x, other, weights, u = (random.standard_normal(s) for s in shapes)
    dx, dother, dweights = u.copy(), np.zeros((4, 5)), np.zeros(2)
    reference.mix_backward(dx, dother, dweights, x, other, weights, first)

    def f(x, other, weights):
        return float((output("mix", (4, width), x, other, weights, first)[0] * u).sum())

    gradients = [dx[:, first : first + 5], dother, dweights]
    assert_gradients(f, gradients, [x, other, weights])


@pytest.mark.parametrize("D", [3, 4])
def test_gradient_of_rope_matches_finite_differences(random, D):
    x, u = random.standard_normal((6, 2 * D + 1)), random.standard_normal((6, 2 * D + 1))
    arguments = 1e4, 3, 2, D, 1

    def f(x):
        y = x.copy()
        reference.rope(y, *arguments)
        return float((y * u).sum())

    dx = u.copy()
    reference.rope(dx, *arguments, inverse=True)
    assert_gradients(f, [dx], [x])


@pytest.mark.parametrize("probability", [0.0, 0.4])
def test_gradient_of_grouped_query_attention_matches_finite_differences(random, probability):
    B, H, G, T, D = 2, 4, 2, 5, 3
    qkv = random.standard_normal((B * T, (H + 2 * G) * D))
    u = random.standard_normal((B * T, H * D))

    def forward(qkv):
        out, logsumexp = np.zeros((B * T, H * D)), np.zeros((B, H, T))
        reference.attention(out, logsumexp, qkv, KEY, probability)
        return out, logsumexp

    dqkv = np.zeros_like(qkv)
    reference.attention_backward(dqkv, u, *forward(qkv), qkv, KEY, probability)
    assert_gradients(lambda qkv: float((forward(qkv)[0] * u).sum()), [dqkv], [qkv])
