"""How numbers of each type in `parts.NUMBER_TYPES` are stored and read, in plain NumPy.

`unpack_` and its name gets arrays of any shape, or the fields of n blocks, scales as (n, 1)
float32, and returns float32, of blocks (n, 32); `pack_` is its reverse. Blocks, of 32 consecutive
values of a row as small integers that share a scale, are those of llama.cpp, to the bit. Products
with q8_0 and q4_0 are in `gemm.quantised`.
Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import numpy as np


def unpack_f16(array):
    with np.errstate(invalid="ignore"):  # ARM tells of signaling NaNs
        return array.view(np.float16).astype(np.float32)


def pack_f16(values):
    """Rounds ties to even; overflow becomes infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16).view(np.uint16)


def unpack_bf16(array):
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def pack_bf16(values):
    """Rounds ties to even; below 2**-126 to zero, as in the instruction of CPUs that have one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))
    up = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, up).astype(np.uint16).view(np.int16)


def unpack_q8_0(scale, q):
    """-> scale * q, q from -127 to 127."""
    return scale * q.astype(np.float32)


def pack_q8_0(x):
    """Makes the value of largest magnitude +-127; halves are rounded away from zero."""
    scales, inverse = _scaled(np.abs(x), 127)
    scaled = x * inverse
    return scales, np.trunc(scaled + np.copysign(np.float32(0.5), scaled))


def unpack_q4_0(scale, q):
    """-> scale * (q - 8), q from 0 to 15."""
    return scale * (_nibbles(q).astype(np.float32) - 8)


def pack_q4_0(x):
    scales, q = _from_lowest(x, -8)
    return scales, _packed(q)


def unpack_q5_0(scale, high, q):
    """-> scale * (q - 16), q from 0 to 31, their highest bits in `high`, the first one lowest."""
    q = _nibbles(q) | np.unpackbits(high, axis=1, bitorder="little") << 4
    return scale * (q.astype(np.float32) - 16)


def pack_q5_0(x):
    scales, q = _from_lowest(x, -16)
    return scales, np.packbits(q >> 4, axis=1, bitorder="little"), _packed(q & 15)


def _nibbles(q):
    """(n, 16) bytes -> (n, 32) integers: the low halves are the first 16."""
    return np.hstack([q & 15, q >> 4])


def _packed(q):
    """(n, 32) integers from 0 to 15 -> (n, 16) bytes."""
    half = q.shape[1] // 2
    return q[:, :half] | q[:, half:] << 4


def _scaled(x, extreme):
    """x (n, 32) -> scales (n,) with which the largest magnitude is `extreme`; (n, 1) 1 / scale."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    scales = largest / np.float32(extreme)
    return scales[:, 0], np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _from_lowest(x, lowest):
    """x (n, 32) -> scales (n,), integers (n, 32) from 0 on, of which 0 means `lowest`.

    The value of largest magnitude becomes the lowest, whatever its sign: it has no positive twin.
    """
    scales, inverse = _scaled(x, lowest)
    # In float64: whether the products are rounded before the addition depends on the CPU.
    scaled = x.astype(np.float64) * inverse + (0.5 - lowest)
    return scales, np.clip(np.trunc(scaled), 0, -2 * lowest - 1).astype(np.uint8)
