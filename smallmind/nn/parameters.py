"""All parameters of a model in one vector, and their gradients in another, with named views."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from smallmind.kernels.alignment import ALIGNMENT, aligned_zeros
from smallmind.kernels.half import round_to

ALIGNED = ALIGNMENT // 4  # elements: no two parameters share a cache line


class Parameters:
    """name -> shape becomes two flat vectors, `data` and `grad`, and views of them by name.

    Matrices lie before vectors, so that the ones that weight decay applies to are the first
    `decayed` elements. Saving, clipping, stepping and hashing are then one line each.

    A model reads the views in `compute`: those of `data`, or after `store_working_copy` those of
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
        self.data: np.ndarray = aligned_zeros(size, dtype)
        self.grad: np.ndarray = aligned_zeros(size, dtype)
        self.count = sum(math.prod(shape) for shape in shapes.values())

        self.views = self._views(self.data)
        self.grad_views = self._views(self.grad)
        self.working: np.ndarray | None = None
        self.compute = self.views

    def _views(self, flat: np.ndarray) -> Mapping[str, np.ndarray]:
        return MappingProxyType(
            {
                name: flat[self._places[name] :][: math.prod(shape)].reshape(shape)
                for name, shape in self._shapes.items()
            }
        )

    def store_working_copy(self, dtype: type | None) -> None:
        """From now on `compute` views a copy in dtype or, for None, the values themselves.

        The optimiser keeps the copy up to date; whoever else writes to the values calls `refresh`.
        """
        self.working = None if dtype is None else aligned_zeros(self.data.size, dtype)
        self.compute = self.views if self.working is None else self._views(self.working)
        self.refresh()

    def refresh(self) -> None:
        """Rounds the values to the working copy, where there is one."""
        if self.working is not None:
            self.working[...] = round_to(self.data, self.working.dtype)
