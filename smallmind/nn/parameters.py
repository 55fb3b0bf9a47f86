"""All parameters of a model in one vector, and their gradients in another, with named views."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from smallmind.kernels.alignment import ALIGNMENT, aligned_zeros
from smallmind.kernels.half import rounded

ALIGNED = ALIGNMENT // 4  # elements: no two parameters share a cache line


class Parameters:
    """name -> shape becomes two flat vectors, `values` and `gradients`, and views of them by name.

    Matrices lie before vectors, so that the ones that weight decay applies to are the first
    `decayed` elements. Saving, clipping, stepping and hashing are then one line each.

    A model reads the views in `used`: those of `values`, or after `store_working_copy` those of
    `working`, a copy in 16 bits.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: type = np.float32) -> None:
        self._shapes = shapes
        self._places: dict[str, int] = {}
        size = 0
        self.decayed = 0
        for name, shape in sorted(shapes.items(), key=lambda item: len(item[1]) < 2):
            self._places[name] = size
            size += -(-math.prod(shape) // ALIGNED) * ALIGNED
            if len(shape) >= 2:
                self.decayed = size
        self.values: np.ndarray = aligned_zeros(size, dtype)
        self.gradients: np.ndarray = aligned_zeros(size, dtype)
        self.count = sum(math.prod(shape) for shape in shapes.values())

        self.value = self._views(self.values)
        self.gradient = self._views(self.gradients)
        self.working: np.ndarray | None = None
        self.used = self.value

    def _views(self, flat: np.ndarray) -> Mapping[str, np.ndarray]:
        return MappingProxyType(
            {
                name: flat[self._places[name] :][: math.prod(shape)].reshape(shape)
                for name, shape in self._shapes.items()
            }
        )

    def store_working_copy(self, dtype: type | None) -> None:
        """From now on `used` are views of a copy in dtype, or, for None, of the values themselves.

        The optimiser keeps the copy up to date; whoever else writes to the values calls `refresh`.
        """
        self.working = None if dtype is None else aligned_zeros(self.values.size, dtype)
        self.used = self.value if self.working is None else self._views(self.working)
        self.refresh()

    def refresh(self) -> None:
        """Rounds the values to the working copy, where there is one."""
        if self.working is not None:
            self.working[...] = rounded(self.values, self.working.dtype)
