"""Attention to kept keys and values: the compiled kernels against plain NumPy."""

import numpy as np
import pytest

from smallmind.kernels import compiled, reference

CASES = [  # B, T, H, G, D, S, and the start of the last sequence
    (1, 1, 1, 1, 1, 1, 0),
    (1, 1, 1, 1, 16, 16, 3),
    (1, 1, 2, 1, 10, 17, 16),
    (2, 1, 4, 2, 64, 40, 17),
    (2, 1, 4, 2, 10, 24, 30),
    (3, 5, 4, 4, 7, 24, 7),
    (1, 3, 6, 3, 33, 50, 46),
    (1, 1, 1, 1, 8, 16, 15),
    (1, 1, 1, 1, 8, 16, 16),
    (1, 1, 3, 3, 20, 31, 1000),
]


def new_arrays(case, seed=0):
    B, T, H, G, D, S, _ = case
    random = np.random.default_rng(seed)
    N = B + 2  # two slots have other sequences
    shapes = (N, G, -(-S // reference.PANEL), D, reference.PANEL), (N, G, S, D)
    kept = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    qkv = random.normal(size=(B * T, (H + 2 * G) * D)).astype(np.float32)
    return kept, qkv, np.full((B * T, H * D), np.nan, np.float32)


def places(case):
    """Where each sequence begins, none before 0, and its slot."""
    B, *_, start = case
    starts = np.maximum(0, start - 3 * np.arange(B)[::-1])
    return starts, np.random.default_rng(2).permutation(B + 2)[:B]


@pytest.mark.parametrize("case", CASES)
def test_keys_and_values_are_kept_in_their_places(case):
    (keys, values), qkv, _ = new_arrays(case)
    ours = keys.copy(), values.copy()
    compiled.keep_keys_values(*ours, qkv, *places(case))
    reference.keep_keys_values(keys, values, qkv, *places(case))
    assert np.array_equal(ours[0], keys) and np.array_equal(ours[1], values)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_attention_to_what_is_kept_equals_plain_numpy(case, has_documents):
    (keys, values), qkv, expected = new_arrays(case)
    B, T, *_ = case
    starts, slots = places(case)
    firsts = None
    if has_documents:
        random = np.random.default_rng(1)
        last = starts[:, None] + np.arange(T)
        firsts = (last - random.integers(0, np.minimum(last + 1, 20), (B, T))).astype(np.int32)
    found = expected.copy()
    for scale in (None, 0.9):
        arguments = qkv, keys, values, starts, slots, firsts, scale
        reference.cached_attention(expected, *arguments)
        compiled.cached_attention(found, *arguments)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_of_more_tokens_than_there_is_room_for_the_last_are_kept():
    S, T = 7, 18
    (keys, values), qkv, _ = new_arrays((2, T, 3, 2, 5, S, 0))
    kept = [(keys.copy(), values.copy()) for _ in range(3)]
    starts, slots = np.array([0, 4]), np.array([2, 0])
    compiled.keep_keys_values(*kept[0], qkv, starts, slots)
    reference.keep_keys_values(*kept[1], qkv, starts, slots)
    for t in range(T):  # one by one
        compiled.keep_keys_values(*kept[2], qkv[t::T].copy(), starts + t, slots)
    for ours, theirs, alone in zip(*kept, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ours, alone)


def test_places_that_are_not_seen_do_not_matter():
    case = (1, 1, 2, 1, 10, 40, 20)
    (keys, values), qkv, expected = new_arrays(case)
    starts, slots = places(case)
    compiled.cached_attention(expected, qkv, keys, values, starts, slots)
    others = np.delete(np.arange(3), slots)
    keys[others] = values[others] = np.nan
    keys[:, :, 1, :, 5:] = keys[:, :, 2] = np.nan
    values[:, :, 21:] = np.nan
    found = np.empty_like(expected)
    compiled.cached_attention(found, qkv, keys, values, starts, slots)
    assert np.array_equal(found, expected)
