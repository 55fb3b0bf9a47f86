"""A hash table of pairs of tokens."""

import numpy as np

from smallmind.kernels.codegen.jit import inline_jit

FREE = -1  # of slots
MIXER = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio


@inline_jit
def pair_slot(slots, lefts, rights, left, right):
    """slots (a power of two,) -> the slot of a pair of tokens: where it is, or where it would go.

    Slots hold indices into lefts and rights, or FREE: at least one of them.
    """
    mask = np.uint64(len(slots) - 1)
    value = (np.uint64(left) << np.uint64(32) | np.uint64(right)) * np.uint64(MIXER)
    slot = value >> np.uint64(32) & mask
    while True:
        pair = slots[slot]
        if pair == FREE or (lefts[pair] == left and rights[pair] == right):
            return slot
        slot = slot + np.uint64(1) & mask
