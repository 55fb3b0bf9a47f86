"""The kernels of the architecture's parts: gradients, awkward sizes, 16 bits, in place, columns."""

import itertools

import numpy as np
import pytest

from smallmind.kernels import compiled, reference
from smallmind.kernels.reference import rotary_frequencies
from tests.kernels.test_compiled import assert_close, normal, run_both

SEED = 5

HEADS = [*itertools.product((1, 65), (1, 5), (1, 3, 16, 33))]  # test_sweep has other sizes


@pytest.mark.parametrize(("R", "H", "D"), HEADS)
def test_norm_heads_matches_the_reference(random, R, H, D):
    for G, extra in ((H, 0), (1, D + 1)):
        n, gains = (H + G) * D, (normal(random, D), normal(random, D))
        x = normal(random, R, n + extra)  # whose other columns stay
        windows = 5 if R == 65 else 1  # which begin anew within a block of rows
        starts = 2 + np.arange(windows) * 3 % 7
        for T, theta, start in ((R, None, None), (R // windows, 1e4, starts), (1, 1e2, None)):
            outputs = [x.copy(), (R, n), (R, H + G)]
            turns = theta and rotary_frequencies(theta, D)
            pairs = run_both("norm_heads", outputs, *gains, H, T, turns, start, 0, 1e-3)
            assert_close(pairs, 3e-6)
            np.testing.assert_array_equal(pairs[1][0], x[:, :n])
            kept, rstd = (pair[1].astype(np.float32) for pair in pairs[1:])
            outputs = [normal(random, R, n + extra), normal(random, D), normal(random, D)]
            pairs = run_both("norm_heads_backward", outputs, kept, rstd, *gains, H, T, turns)
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
    turns = rotary_frequencies(1e4, D)
    compiled.rope(expected, turns, 3, H + G, D, np.array([1]))
    y, kept, rstd = x.copy(), np.empty_like(x), np.empty((R, H + G), np.float32)
    compiled.norm_heads(y, kept, rstd, *gains, H, 3, turns, np.array([1]))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("R", "H", "D"), HEADS)
def test_rope_matches_the_reference_and_its_inverse_restores(random, R, H, D):
    x = normal(random, R, H * D + 3)
    turns = rotary_frequencies(1e4, D)
    for T, starts in ((R, [2]), (1, [0]), (1, np.arange(R) * 5 % 11)):
        for some, inverse in ((turns, False), (turns, True), (turns[: len(turns) // 2], True)):
            arguments = some, T, H, D, np.array(starts), 0, inverse
            assert_close(run_both("rope", [x], *arguments))
    turned = x.copy()
    compiled.rope(turned, turns, R, H, D)
    compiled.rope(turned, turns, R, H, D, inverse=True)
    np.testing.assert_allclose(turned, x, atol=1e-6)


@pytest.mark.parametrize(("R", "C"), [(1, 1), (3, 16), (65, 33)])
def test_columns_between_others_match_the_reference(random, R, C):
    x, dy, weights = 3 * normal(random, R, C), normal(random, R, C), normal(random, 2)
    start = normal(random, R, C + 5)
    assert_close(run_both("copy_columns", [(R, C)], normal(random, R, C + 5), 3))
    assert_close(run_both("mix", [start], x, dy, weights, 3))
    outputs = [start, normal(random, R, C), normal(random, 2)]
    assert_close(run_both("mix_backward", outputs, x, dy, weights, 3), 2e-6 * np.sqrt(R * C))


STARTS = [(1, 1, [9]), (3, 1, [0]), (1, 40, [3]), (5, 7, [2]), (3, 2, [4, 0, 7])]


@pytest.mark.parametrize("C", [1, 16, 45])
@pytest.mark.parametrize(("B", "T", "starts"), STARTS)
def test_rows_of_positions_are_added_from_a_start_on(random, B, T, starts, C):
    ids = random.integers(0, 6, (B, T)).astype(np.int32)
    starts = np.array(starts)
    arguments = normal(random, 6, C), ids, normal(random, starts.max() + T + 1, C), starts
    ((fast, slow),) = run_both("embedding", [(B * T, C)], *arguments)
    np.testing.assert_array_equal(fast, slow.astype(np.float32))
    expected = arguments[0][ids] + arguments[2][starts[:, None] + np.arange(T)]
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
        kernels.document_starts(found, part, 3, begun, np.full(len(part), begin))
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
