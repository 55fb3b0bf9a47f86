"""16-bit floating point: how arrays of it are represented, and their conversion in plain NumPy.

16 bits are a storage format only: kernels convert to float32 as they load, and back as they store.
NumPy has no bfloat16 and Numba no float16, so arrays hold the bits: uint16 those of float16, int16
those of bfloat16.
"""

from typing import Any

import numpy as np

FLOAT16 = np.uint16
BFLOAT16 = np.int16


def to_float32(array: np.ndarray) -> np.ndarray:
    """array -> its values as float32; an array of float32 or float64 is returned unchanged."""
    if array.dtype == FLOAT16:
        with np.errstate(invalid="ignore"):  # ARM tells of signaling NaNs
            return array.view(np.float16).astype(np.float32)
    if array.dtype == BFLOAT16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def round_to(values: np.ndarray, dtype: Any) -> np.ndarray:
    """values float32 -> an array of dtype, rounded to nearest, ties to even.

    In bfloat16 numbers below 2**-126 become zero, as in the instruction of CPUs that have one.
    """
    if dtype == FLOAT16:
        # Overflow becomes infinity; ARM tells of signaling NaNs.
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16).view(FLOAT16)
    if dtype == BFLOAT16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        bits = np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))
        up = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
        return np.where(np.isnan(values), bits >> 16 | 0x40, up).astype(np.uint16).view(BFLOAT16)
    return values.astype(dtype)
