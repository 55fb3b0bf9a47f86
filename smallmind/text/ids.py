"""Token ids from outside: checked before anything uses them as indices."""

from typing import Any

import numpy as np

from smallmind.checks import InputError

CHUNK = 1 << 16  # ids that are looked up together
# As unsigned numbers, negative ones are larger than any vocabulary.
_UNSIGNED = {np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}


def check_ids(name: str, ids: Any, vocab_size: int) -> np.ndarray:
    """ids, an array or nested lists -> the array. InputError naming the first one that is wrong."""
    try:
        array = np.asarray(ids)
    except ValueError:
        raise InputError(f"{name} has rows of different lengths") from None
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} is of type {array.dtype}; it must hold whole numbers")
    if array.size and not _are_inside(array, vocab_size):
        index = tuple(np.argwhere((array < 0) | (array >= vocab_size))[0].tolist())
        shown = ", ".join(map(str, index))
        raise InputError(
            f"{name}[{shown}] = {array[index]} is outside the vocabulary of {vocab_size}"
        )
    return array


def _are_inside(ids: np.ndarray, vocab_size: int) -> bool:
    if unsigned := _UNSIGNED.get(ids.dtype):
        return bool(ids.view(unsigned).max() < vocab_size)  # half the time of two comparisons
    return bool(ids.min() >= 0 and ids.max() < vocab_size)


def total(table: np.ndarray, ids: np.ndarray) -> int:
    """table (V,) of whole numbers, ids of any shape -> the sum of table[ids]."""
    flat = ids.reshape(-1)
    # In chunks: as a whole it would take twice the memory of the ids.
    return sum(int(table[flat[i : i + CHUNK]].sum()) for i in range(0, len(flat), CHUNK))
