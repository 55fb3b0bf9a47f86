"""Packs sequences of different lengths into rows of one length, with little left empty."""

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from smallmind.console import activity
from smallmind.settings.rules import LONGEST_WINDOW

# Windows for conversations: as long as nearly all of them, in steps, then until little is empty.
FITTING_SHARE, WINDOW_STEP, EMPTY_SHARE = 0.95, 64, 0.015
# More rows than the fewest that are tried, as a share, so that they can be made even.
MORE_ROWS = (0.0, 0.02, 0.04)


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """lengths (n,), at most capacity each -> the order of sequences, and the ends of rows in it.

    Row i has the sequences order[ends[i - 1] : ends[i]]. Best fit: the longest first, each into the
    fullest row that has room for it (Johnson et al. 1974). Rows with the same room are taken in the
    order in which they were last filled, so that the result depends on the lengths alone.
    """
    rows: list[list[int]] = []
    # The rows that have exactly this much room; `rooms` has a bit for each length that occurs.
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for i, length in _longest_first(lengths):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(i)
        with_room[room - length].append(row)
        rooms |= 1 << (room - length)
    order = np.array([i for row in rows for i in row], np.int64)
    return order, np.cumsum([len(row) for row in rows], dtype=np.int64)


def pack_evenly(
    lengths: np.ndarray, weights: np.ndarray, capacity: int, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Packs like `pack`, into rows that have about the same sum of weights (n,), one per sequence.

    Their number is a multiple of `multiple` if that takes few more rows.
    """
    order, ends = pack(lengths, capacity)
    fewest = len(ends)
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = np.repeat(np.arange(fewest), np.diff(ends, prepend=0))
    tried = [math.ceil((1 + share) * fewest) for share in MORE_ROWS]
    for count in tried:
        whole = math.ceil(count / multiple) * multiple
        count = whole if whole <= tried[-1] else count
        spread = _spread(lengths, capacity, count) if count <= len(lengths) else None
        if spread is not None:
            row_of = spread
            break
    row_of = _exchanged(lengths, weights, row_of)
    return np.argsort(row_of, kind="stable"), np.cumsum(np.bincount(row_of))


def _longest_first(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields each sequence by number, and its length."""
    order = np.argsort(-lengths, kind="stable")
    yield from activity.parts(list(zip(order.tolist(), lengths[order].tolist(), strict=True)))


def _spread(lengths: np.ndarray, capacity: int, count: int) -> np.ndarray | None:
    """-> the row of each: the longest first, into the emptiest (Graham 1969); None if full."""
    rows = [(0, row) for row in range(count)]  # a heap by what they hold
    row_of = np.empty(len(lengths), np.int64)
    for i, length in _longest_first(lengths):
        held, row = rows[0]
        if held + length > capacity:
            return None
        heapq.heapreplace(rows, (held + length, row))
        row_of[i] = row
    return row_of


def _exchanged(lengths: np.ndarray, weights: np.ndarray, row_of: np.ndarray) -> np.ndarray:
    """-> the rows of sequences, of which those of the same length have changed places.

    So that rows have about the same sum of weights: of each length, the longest first, the heaviest
    goes to the row that would else be the lightest.
    """
    if not len(lengths):
        return row_of
    longest_first = np.argsort(-lengths, kind="stable")
    changes = np.flatnonzero(np.diff(lengths[longest_first])) + 1
    groups = np.split(longest_first, changes)
    means = [weights[group].mean() for group in groups]
    expected, exchanged = np.zeros(row_of.max() + 1), row_of.copy()
    for group, mean in zip(groups, means, strict=True):
        np.add.at(expected, row_of[group], mean)
    for group, mean in zip(groups, means, strict=True):
        places = row_of[group]
        np.subtract.at(expected, places, mean)
        places = places[np.argsort(expected[places], kind="stable")]
        heaviest_first = group[np.argsort(-weights[group], kind="stable")]
        exchanged[heaviest_first] = places
        np.add.at(expected, places, weights[heaviest_first])
    return exchanged


def window_for(sequences: Sequence[int]) -> int:
    """Chooses the tokens of windows for conversations of these lengths, in tokens."""
    lengths = np.array(sequences)
    least = WINDOW_STEP * int(np.ceil(np.quantile(lengths, FITTING_SHARE) / WINDOW_STEP))
    least = min(LONGEST_WINDOW, max(2 * WINDOW_STEP, least))
    fullest, best = 1.0, least
    for T in range(least, LONGEST_WINDOW + 1, WINDOW_STEP):
        inside = np.minimum(lengths - 1, T)
        empty = 1 - inside.sum() / (T * len(pack(inside, T)[1]))
        if empty < fullest:
            fullest, best = empty, T
        if fullest <= EMPTY_SHARE:
            break
    return best
