"""Storage formats of weights in files: float32, 16 bits, or blocks of 8-bit integers."""

import math
from typing import NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.kernels.half import BFLOAT16, FLOAT16, round_to, to_float32

MAX_FLOAT16 = 65504.0
DTYPES = {"f32": np.float32, "f16": FLOAT16, "bf16": BFLOAT16}
BLOCK = 32  # consecutive values of a row that share a scale, in q8_0


class NumberType(NamedTuple):
    """A way to store numbers up to `most`: `block` of them take `nbytes`."""

    name: str
    block: int
    nbytes: int
    most: float

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if the rows of a tensor are whole blocks."""
        return bool(shape) and shape[-1] % self.block == 0

    def size(self, shape: tuple[int, ...]) -> int:
        """The bytes of a tensor."""
        return math.prod(shape) // self.block * self.nbytes

    def encode(self, values: np.ndarray) -> np.ndarray:
        """values float32 of any shape that fits -> what is stored of them.

        InputError if one is too large for that.
        """
        if np.abs(values).max(initial=0) > self.most:
            raise InputError(
                f"a weight is {np.abs(values).max():g}, too large for {self.name}; choose bf16 or "
                "f32"
            )
        if self.name == "q8_0":
            return quantise(values)
        return round_to(np.ascontiguousarray(values, np.float32), DTYPES[self.name])

    def decode(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Bytes, uint8 -> values float32 in this shape."""
        if self.name == "q8_0":
            return dequantise(stored).reshape(shape)
        return to_float32(stored.view(DTYPES[self.name])).reshape(shape)


NUMBER_TYPES = {
    kind.name: kind
    for kind in (
        NumberType("f32", 1, 4, math.inf),
        NumberType("f16", 1, 2, MAX_FLOAT16),
        NumberType("bf16", 1, 2, math.inf),
        NumberType("q8_0", BLOCK, 2 + BLOCK, 127 * MAX_FLOAT16),  # the scale is float16
    )
}


def quantise(values: np.ndarray) -> np.ndarray:
    """values (..., n BLOCK) float32 -> (n blocks, 2 + BLOCK) uint8.

    Each block is the float16 d = max |x| / 127, then x / d rounded, halves away from zero: the bits
    that llama.cpp writes.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
        scaled = blocks * inverse
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.hstack([scales.astype("<f2").view(np.uint8), rounded.view(np.uint8)])


def dequantise(stored: np.ndarray) -> np.ndarray:
    """The reverse: bytes, uint8 -> (n blocks, BLOCK) float32."""
    blocks = stored.reshape(-1, 2 + BLOCK)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    return scales * blocks[:, 2:].view(np.int8).astype(np.float32)
