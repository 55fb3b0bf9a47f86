"""Packs sequences of different lengths into rows of one length, with little left empty."""

import numpy as np

from smallmind.console import activity


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
    longest_first = np.argsort(-lengths, kind="stable")
    for i, length in activity.parts(
        list(zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True))
    ):
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
