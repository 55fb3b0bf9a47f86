"""Arrays with guard values around them, to catch a kernel that writes outside its output."""

import math

import numpy as np

GUARD = 12345
NAN_BITS = 0x7FFF  # NaN in float16 and in bfloat16
WIDTH = 64  # elements on either side


class Guarded:
    """`array` (shape) filled with NaN, or with a copy of `values`, between two guards."""

    def __init__(self, shape, values=None, dtype=np.float32):
        size = math.prod(shape)
        self.whole = np.full(size + 2 * WIDTH, GUARD, dtype)
        self.array = self.whole[WIDTH : WIDTH + size].reshape(shape)
        nan = np.nan if dtype == np.float32 else NAN_BITS
        self.array[...] = nan if values is None else values

    def assert_intact(self):
        assert (self.whole[:WIDTH] == GUARD).all(), "wrote before the array"
        assert (self.whole[-WIDTH:] == GUARD).all(), "wrote past the array"
