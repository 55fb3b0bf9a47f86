"""Weights as small integers in blocks that share a scale: how they are stored, in plain NumPy.

The blocks are those of llama.cpp: 32 consecutive values of a row, with a scale in float16. They are
a storage format of weights that are not trained; products with them are in `gemm.quantised`. An
array of them has the number type of a block, so that one of shape (N, K / 32) holds N rows of K
values.
Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from typing import Any

import numpy as np

BLOCK = 32  # values that share a scale
HALF = BLOCK // 2
# scale * q, q from -127 to 127
Q8_0 = np.dtype([("scale", "<u2"), ("q", "i1", (BLOCK,))])
# scale * (q - 8), q from 0 to 15: the low halves of bytes are the first 16 values
Q4_0 = np.dtype([("scale", "<u2"), ("q", "u1", (HALF,))])
# scale * (q - 16), q from 0 to 31: as in q4_0, and 32 highest bits, the first one lowest
Q5_0 = np.dtype([("scale", "<u2"), ("high", "u1", (BLOCK // 8,)), ("q", "u1", (HALF,))])
QUANTISED = {"q8_0": Q8_0, "q4_0": Q4_0, "q5_0": Q5_0}
# The value that takes the largest integer of a block; -8 because that one has no positive twin.
EXTREMES = {Q8_0: 127, Q4_0: -8, Q5_0: -16}


def is_quantised(dtype: Any) -> bool:
    """True for the number type of a block."""
    return dtype in (Q8_0, Q4_0, Q5_0)


def quantise(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """values (..., n BLOCK) float32 -> blocks (..., n), to the bit those of llama.cpp.

    In q8_0 the value of largest magnitude becomes +-127, halves are rounded away from zero. In the
    others it becomes the lowest integer, whatever its sign.
    """
    shape = (*values.shape[:-1], values.shape[-1] // BLOCK)
    x = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK)
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    largest = np.abs(largest) if dtype == Q8_0 else largest
    scales = largest / np.float32(EXTREMES[dtype])
    blocks = np.zeros(len(x), dtype)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        blocks["scale"] = scales[:, 0].astype(np.float16).view(np.uint16)
        inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
        if dtype == Q8_0:
            rounded = x * inverse
            blocks["q"] = np.trunc(rounded + np.copysign(np.float32(0.5), rounded))
        else:
            # In float64: whether the products are rounded before the addition depends on the CPU.
            lowest = -EXTREMES[dtype]
            scaled = x.astype(np.float64) * inverse + (lowest + 0.5)
            _pack(blocks, np.clip(np.trunc(scaled), 0, 2 * lowest - 1).astype(np.uint8))
    return blocks.reshape(shape)


def _pack(blocks: np.ndarray, q: np.ndarray) -> None:
    """q (n, BLOCK), from 0 on -> the bits of blocks (n,)."""
    blocks["q"] = (q[:, :HALF] & 15) | (q[:, HALF:] & 15) << 4
    if blocks.dtype == Q5_0:
        blocks["high"] = np.packbits(q >> 4, axis=1, bitorder="little")


def integers(blocks: np.ndarray) -> np.ndarray:
    """blocks (n,) -> their values over their scales (n, BLOCK), int8."""
    if blocks.dtype == Q8_0:
        return blocks["q"]
    q = np.hstack([blocks["q"] & 15, blocks["q"] >> 4])
    if blocks.dtype == Q5_0:
        q |= np.unpackbits(blocks["high"], axis=1, bitorder="little") << 4
    return q.astype(np.int8) + np.int8(EXTREMES[blocks.dtype])


def dequantise(blocks: np.ndarray) -> np.ndarray:
    """blocks (..., n) -> values (..., n BLOCK), float32."""
    flat = np.ascontiguousarray(blocks).reshape(-1)
    scales = flat["scale"].view(np.float16).astype(np.float32)
    values = scales[:, None] * integers(flat).astype(np.float32)
    return values.reshape(*blocks.shape[:-1], blocks.shape[-1] * BLOCK)
