"""Storage formats of weights in files: float32, 16 bits, or blocks of integers with a scale."""

import math
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.kernels.half import BFLOAT16, FLOAT16, round_to
from smallmind.kernels.quantised import (
    BLOCK,
    EXTREMES,
    QUANTISED,
    is_quantised,
    quantise,
)

MAX_FLOAT16 = 65504.0


class NumberType(NamedTuple):
    """A way to store numbers up to `most` as items of dtype: numbers, or blocks of them."""

    name: str
    dtype: Any
    most: float

    @property
    def is_quantised(self) -> bool:
        """True for blocks of integers."""
        return is_quantised(self.dtype)

    @property
    def block(self) -> int:
        """The numbers in an item."""
        return BLOCK if self.is_quantised else 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if the rows of a tensor are whole blocks."""
        return bool(shape) and shape[-1] % self.block == 0

    def size(self, shape: tuple[int, ...]) -> int:
        """The bytes of a tensor."""
        return math.prod(shape) // self.block * np.dtype(self.dtype).itemsize

    def encode(self, values: np.ndarray) -> np.ndarray:
        """values float32 of any shape that fits -> what is stored of them.

        InputError if one is too large for that.
        """
        if np.abs(values).max(initial=0) > self.most:
            raise InputError(
                f"a weight is {np.abs(values).max():g}, too large for {self.name}; choose bf16 or "
                "f32"
            )
        if self.is_quantised:
            return quantise(values, self.dtype)
        return round_to(np.ascontiguousarray(values, np.float32), self.dtype)


NUMBER_TYPES = {
    kind.name: kind
    for kind in (
        NumberType("f32", np.float32, math.inf),
        NumberType("f16", FLOAT16, MAX_FLOAT16),
        NumberType("bf16", BFLOAT16, math.inf),
        # Their scales are float16.
        *(
            NumberType(name, QUANTISED[name], abs(EXTREMES[QUANTISED[name]]) * MAX_FLOAT16)
            for name in QUANTISED
        ),
    )
}
