"""Weights as small integers in blocks that share a scale: how those of each type are stored.

The blocks are those of llama.cpp: 32 consecutive values of a row. `unpack_` gets the fields of n
blocks, scales as (n, 1) float32, and returns the values (n, 32); `pack_` is its reverse, to the bit
that of llama.cpp. Products with q8_0 and q4_0 are in `gemm.quantised`.
Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import numpy as np


def unpack_q8_0(scale, q):
    """scale * q, q from -127 to 127."""
    return scale * q.astype(np.float32)


def pack_q8_0(x):
    """The value of largest magnitude becomes +-127, halves are rounded away from zero."""
    scales, inverse = _scaled(np.abs(x), 127)
    scaled = x * inverse
    return scales, np.trunc(scaled + np.copysign(np.float32(0.5), scaled))


def unpack_q4_0(scale, q):
    """scale * (q - 8), q from 0 to 15."""
    return scale * (_nibbles(q).astype(np.float32) - 8)


def pack_q4_0(x):
    scales, q = _from_lowest(x, -8)
    return scales, _packed(q)


def unpack_q5_0(scale, high, q):
    """scale * (q - 16), q from 0 to 31, whose highest bits are in `high`, the first one lowest."""
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
