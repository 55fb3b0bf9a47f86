"""Attention that stays inside documents: the compiled kernels against the reference, and itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind.kernels import compiled, reference
from smallmind.kernels.attention import backward, forward
from tests.kernels.test_compiled import (
    KEY,
    assert_attention_matches,
    assert_close,
    attention_of,
    normal,
)

SEED = 23

SIZES = (1, 2, 17, 64, 65, 257)
PLACES = {  # of the separators in a window of T tokens
    "none": lambda _: [],
    "first": lambda _: [0],
    "last": lambda T: [T - 1],
    "both ends": lambda T: [0, T - 1],
    "adjacent": lambda T: [T // 2, min(T - 1, T // 2 + 1)],
    "third": lambda T: [T // 3],
    "many": lambda T: range(0, T, 7),
    "vectors": lambda T: range(0, T, 16),
    "everywhere": range,
}


def firsts_at(*windows, T):
    """The places of the separators in each window -> firsts (B, T)."""
    ids = np.zeros((len(windows), T), np.int32)
    for row, places in zip(ids, windows, strict=True):
        row[list(places)] = 1
    firsts = np.empty_like(ids)
    compiled.document_starts(firsts, ids, 1)
    return firsts


def assert_match(random, B, H, G, D, firsts, probability):
    T = firsts.shape[1]
    mask = KEY, probability, 5 * T, firsts
    assert_attention_matches(random, B, H, G, T, D, *mask, tolerances=(5e-6, 1e-5))


@pytest.mark.parametrize("kernels", [compiled, reference], ids=["compiled", "reference"])
def test_a_document_begins_at_its_token(kernels):
    ids = np.array([[4, 9, 1, 9, 9, 0], [9, 1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6]], np.int32)
    firsts = np.full_like(ids, -1)
    kernels.document_starts(firsts, ids, 9)
    expected = [[0, 1, 1, 3, 4, 4], [0, 0, 0, 0, 0, 5], [0] * 6]
    np.testing.assert_array_equal(firsts, expected)


@pytest.mark.parametrize("T", SIZES)
def test_document_starts_match_the_reference(random, T):
    for share in (0.0, 0.02, 0.3, 1.0):
        ids = (random.random((3, T)) < share).astype(np.int32)
        fast, slow = np.full_like(ids, -1), np.full_like(ids, -1)
        compiled.document_starts(fast, ids, 1)
        reference.document_starts(slow, ids, 1)
        np.testing.assert_array_equal(fast, slow)


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize(("H", "G", "D"), [(1, 1, 1), (4, 2, 16), (3, 1, 33), (2, 2, 80)])
@pytest.mark.parametrize("T", SIZES)
def test_attention_in_documents_matches_the_reference(random, T, H, G, D, probability):
    for places in PLACES.values():
        firsts = firsts_at(places(T), PLACES["third"](T), T=T)
        assert_match(random, 2, H, G, D, firsts, probability)


@pytest.mark.parametrize("kernels", [compiled, reference], ids=["compiled", "reference"])
def test_a_window_ends_at_its_token_and_stays_in_its_document(kernels):
    firsts = np.full((2, 6), -1, np.int32)
    kernels.window_firsts(firsts, 3, np.array([0]))
    np.testing.assert_array_equal(firsts, [[0, 0, 0, 1, 2, 3]] * 2)
    documents = np.array([[0, 0, 0, 0, 4, 4], [0, 1, 1, 1, 1, 1]], np.int32)
    kernels.window_firsts(firsts, 3, np.array([0, 0]), documents)
    np.testing.assert_array_equal(firsts, [[0, 0, 0, 1, 4, 4], [0, 1, 1, 1, 2, 3]])
    kernels.window_firsts(firsts, 3, np.array([1, 50]))
    np.testing.assert_array_equal(firsts, [[0, 0, 1, 2, 3, 4], range(48, 54)])


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 64, 65, 130])
@pytest.mark.parametrize(("H", "G", "D"), [(4, 2, 16), (3, 1, 33)])
def test_attention_in_windows_matches_the_reference(random, window, H, G, D):
    for T in SIZES:
        documents = firsts_at([], PLACES["third"](T), T=T)
        firsts = np.empty_like(documents)
        compiled.window_firsts(firsts, window, np.array([0]), documents)
        assert_match(random, 2, H, G, D, firsts, 0.2 * (window % 2))


@settings(max_examples=60, deadline=None)
@given(
    windows=st.lists(st.sets(st.integers(0, 199), max_size=20), min_size=1, max_size=2),
    T=st.integers(1, 200),
    G=st.integers(1, 2),
    shared=st.integers(1, 2),
    D=st.integers(1, 40),
)
def test_attention_in_any_documents_matches_the_reference(windows, T, G, shared, D):
    inside = [{place for place in places if place < T} for places in windows]
    firsts = firsts_at(*inside, T=T)
    assert_match(np.random.default_rng(T), len(windows), G * shared, G, D, firsts, 0.0)


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize("T", SIZES)
def test_one_document_gives_the_same_bits_as_none(random, T, probability):
    B, H, D = 2, 3, 24
    qkv, dout = normal(random, B * T, 3 * H * D), normal(random, B * T, H * D)
    masks = [(KEY, probability, 0, firsts) for firsts in (None, np.zeros((B, T), np.int32))]
    results = [attention_of(qkv, dout, (B, H, T), *mask) for mask in masks]
    for none, one in zip(*results, strict=True):
        np.testing.assert_array_equal(none, one)


@pytest.mark.parametrize("T", [2, 17, 65, 257])
def test_a_document_gets_nothing_from_the_one_before_and_gives_it_nothing(random, T):
    H, D = 2, 24
    for place in {1, T // 3, T // 2, T - 1} - {0}:
        mask = KEY, 0.2, 0, firsts_at([place], T=T)
        qkv, dout = normal(random, T, 3 * H * D), normal(random, T, H * D)
        before = attention_of(qkv, dout, (1, H, T), *mask)
        first, second = slice(0, place), slice(place, T)
        for changed, others in ((first, second), (second, first)):
            moved, other_dout = qkv.copy(), dout.copy()
            moved[changed] = 9 * normal(random, *moved[changed].shape)
            other_dout[changed] *= -2
            after = attention_of(moved, other_dout, (1, H, T), *mask)
            np.testing.assert_array_equal(before[0][others], after[0][others])
            np.testing.assert_array_equal(before[2][others], after[2][others])
            np.testing.assert_array_equal(before[1][0, :, others], after[1][0, :, others])


def test_a_document_in_a_window_equals_the_document_alone(random):
    T, place, H, D = 150, 61, 2, 24
    qkv, dout = normal(random, T, 3 * H * D), normal(random, T, H * D)
    window = attention_of(qkv, dout, (1, H, T), 0, 0.0, 0, firsts_at([place], T=T))
    alone = attention_of(qkv[place:].copy(), dout[place:].copy(), (1, H, T - place))
    assert_close([(window[0][place:], alone[0]), (window[2][place:], alone[2])], 3e-6)
    assert_close([(window[1][:, :, place:], alone[1])], 3e-6)


def test_scores_of_other_documents_may_be_of_any_size(random):
    T, D = 40, 4
    for factor in (1e6, -1e6):  # of a key of the first document
        qkv, dout = normal(random, T, 3 * D), normal(random, T, D)
        qkv[3, D : 2 * D] *= factor
        firsts = firsts_at([8], T=T)
        with np.errstate(all="raise", under="ignore"):
            out, logsumexp, dqkv = attention_of(qkv, dout, (1, 1, T), 0, 0.0, 0, firsts)
        alone = attention_of(qkv[8:].copy(), dout[8:].copy(), (1, 1, T - 8))
        assert_close([(out[8:], alone[0]), (dqkv[8:], alone[2])], 3e-6)
        assert np.isfinite(logsumexp).all()


def test_documents_compile_no_further_kernels(random):
    T, D = 9, 8
    qkv, dout = normal(random, T, 3 * D), normal(random, T, D)
    kernels = (forward._attention, backward._attention_backward)
    dispatchers = [
        cell.cell_contents
        for kernel in kernels
        for cell in kernel.__closure__
        if hasattr(cell.cell_contents, "signatures")
    ]
    assert len(dispatchers) == 2
    attention_of(qkv, dout, (1, 1, T))
    before = [len(dispatcher.signatures) for dispatcher in dispatchers]
    attention_of(qkv, dout, (1, 1, T), KEY, 0.2, 0, firsts_at([3], T=T))
    assert [len(dispatcher.signatures) for dispatcher in dispatchers] == before


@pytest.mark.parametrize("T", [17, 65])
def test_a_mask_that_begins_one_key_early_or_late_is_noticed(random, T):
    B, H, D = 1, 2, 16
    qkv, dout = normal(random, T, 3 * H * D), normal(random, T, H * D)
    firsts = firsts_at([T // 2], T=T)
    right = attention_of(qkv, dout, (B, H, T), 0, 0.0, 0, firsts)
    for shift in (-1, 1):
        wrong = firsts_at([T // 2 + shift], T=T)
        results = attention_of(qkv, dout, (B, H, T), 0, 0.0, 0, wrong)
        for x, y in zip(right, results, strict=True):
            assert np.abs(x - y).max() > 1e-2
