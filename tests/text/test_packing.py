"""Packing sequences into rows: nothing is lost, rows are full, the result is always the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.text.packing import pack


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
