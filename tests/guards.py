"""Arrays with guard values around them, to catch a kernel that writes outside its output."""

import math

import numpy as np

GUARD = np.float32(12345.0)
WIDTH = 64  # elements on either side


class Guarded:
    """`array` (shape) filled with `fill`, or with a copy of `values`, between two guards."""

    def __init__(self, shape, fill=np.nan, values=None):
        size = math.prod(shape)
        self.whole = np.full(size + 2 * WIDTH, GUARD, np.float32)
        self.array = self.whole[WIDTH : WIDTH + size].reshape(shape)
        self.array[...] = fill if values is None else values

    def assert_intact(self):
        assert (self.whole[:WIDTH] == GUARD).all(), "wrote before the array"
        assert (self.whole[-WIDTH:] == GUARD).all(), "wrote behind the array"
