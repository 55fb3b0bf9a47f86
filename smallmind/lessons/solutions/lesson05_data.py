"""Solutions of "Data"."""

import numpy as np


# %% Exercise 1
def cut_windows(tokens, starts, T):
    """tokens (n,), starts (B,) -> ids, targets (B, T)."""
    windows = tokens[starts[:, None] + np.arange(T + 1)]  # one more than the inputs
    return windows[:, :-1], windows[:, 1:]


# %% Exercise 2
def document_mask(lengths, T):
    """-> (T, T), True where the query of a row may look at the key of a column."""
    lengths = [*lengths, *[1] * (T - sum(lengths))]  # an empty place is a document of its own
    document = np.repeat(np.arange(len(lengths)), lengths)
    return np.tri(T, dtype=bool) & (document[:, None] == document[None, :])


# %% Exercise 3
def pack_documents(lengths, capacity):
    """lengths, at most capacity each -> lists of document numbers, a list for each window."""
    windows: list[list[int]] = []
    rooms: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = (i for i, room in enumerate(rooms) if room >= lengths[document])
        window = next(fitting, None)
        if window is None:
            window = len(windows)
            windows.append([])
            rooms.append(capacity)
        windows[window].append(document)
        rooms[window] -= lengths[document]
    return windows
