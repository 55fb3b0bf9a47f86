"""All parameters of a model in one vector, and their gradients in another, with named views."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from smallmind.kernels.alignment import aligned_zeros

ALIGNED = 16  # elements: no two parameters share a cache line


class Parameters:
    """name -> shape becomes two flat vectors, `values` and `gradients`, and views of them by name.

    Matrices lie before vectors, so that the ones that weight decay applies to are the first
    `decayed` elements. Saving, clipping, stepping and hashing are then one line each.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: type = np.float32) -> None:
        places, size = {}, 0
        self.decayed = 0
        for name, shape in sorted(shapes.items(), key=lambda item: len(item[1]) < 2):
            places[name] = size
            size += -(-math.prod(shape) // ALIGNED) * ALIGNED
            if len(shape) >= 2:
                self.decayed = size
        self.values: np.ndarray = aligned_zeros(size, dtype)
        self.gradients: np.ndarray = aligned_zeros(size, dtype)
        self.count = sum(math.prod(shape) for shape in shapes.values())

        def views(flat: np.ndarray) -> Mapping[str, np.ndarray]:
            return MappingProxyType(
                {
                    name: flat[places[name] : places[name] + math.prod(shape)].reshape(shape)
                    for name, shape in shapes.items()
                }
            )

        self.value = views(self.values)
        self.gradient = views(self.gradients)
