"""Packing sequences into rows: nothing is lost, rows are full, the result is always the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.text.packing import pack, pack_evenly


def rows_of(lengths, capacity):
    order, ends = pack(np.array(lengths, np.int64), capacity)
    return np.split(order, ends[:-1]) if len(ends) else []


@given(st.lists(st.integers(1, 37), max_size=80))
def test_each_sequence_is_in_one_row_that_holds_it(lengths):
    rows = rows_of(lengths, 37)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 37 for row in rows)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_no_two_rows_would_fit_into_one(lengths):
    taken = sorted(sum(lengths[i] for i in row) for row in rows_of(lengths, 16))
    assert len(taken) < 2 or taken[0] + taken[1] > 16


def test_it_depends_on_the_lengths_alone():
    lengths = np.random.default_rng(3).integers(1, 60, 500)
    assert all(map(np.array_equal, pack(lengths, 64), pack(lengths.copy(), 64)))


@pytest.mark.parametrize("capacity", [256, 512])
def test_lengths_like_those_of_conversations_leave_little_empty(capacity):
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(4.5, 0.6, 5000).astype(int), 5, capacity)
    _, ends = pack(lengths, capacity)
    assert lengths.sum() > 0.99 * len(ends) * capacity


@given(
    st.lists(st.tuples(st.integers(1, 37), st.integers(0, 37)), max_size=80),
    st.integers(1, 9),
)
def test_rows_that_are_even_hold_each_sequence_once_too(sequences, multiple):
    lengths, weights = np.array(sequences, np.int64).reshape(-1, 2).T
    order, ends = pack_evenly(lengths, weights, 37, multiple)
    assert sorted(order) == list(range(len(lengths)))
    rows = np.split(order, ends[:-1]) if len(ends) else []
    assert all(len(row) and lengths[row].sum() <= 37 for row in rows)
    fewest = len(pack(lengths, 37)[1])
    assert len(rows) <= max(fewest, -(-fewest * 104 // 100))
    same = pack_evenly(lengths.copy(), weights.copy(), 37, multiple)
    assert all(map(np.array_equal, same, (order, ends)))


def like_pairs(count=990):
    """Lengths of questions with short answers, and the tokens of the answers."""
    random = np.random.default_rng(1)
    learned = np.clip(random.lognormal(2.5, 0.6, count).astype(int), 2, 60)
    return learned + random.integers(18, 40, count), learned


@pytest.mark.parametrize("capacity", [256, 704, 960])
def test_rows_have_about_the_same_number_of_learned_tokens(capacity):
    lengths, learned = like_pairs()
    order, ends = pack(lengths, capacity)
    before = [learned[row].sum() for row in np.split(order, ends[:-1])]
    assert min(before) < np.mean(before) / 2  # the last row holds what is left
    order, ends = pack_evenly(lengths, learned, capacity)
    rows = [learned[row].sum() for row in np.split(order, ends[:-1])]
    assert max(rows) < 1.1 * np.mean(rows) and min(rows) > 0.9 * np.mean(rows)


@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_the_number_of_rows_suits_the_batches(multiple):
    lengths, learned = like_pairs()
    assert len(pack_evenly(lengths, learned, 704, multiple)[1]) % multiple == 0
