"""How numbers of each type in `parts.NUMBER_TYPES` are stored and read, in plain NumPy.

`unpack_` and its name gets arrays of any shape, or the fields of n blocks, those of float16 as
(n, 1) float32, and returns float32, of blocks (n, values); `pack_` is its reverse. The `parts` of
an `unpack_` of blocks returns the arguments of the kernel `dequantise` instead. Blocks, of
consecutive values of a row as small integers that share a scale, are those of llama.cpp, to the
bit. In a block of 256, groups of 16 or 32 values have small integers as scales, which share a scale
themselves. Products with q8_0 and q4_0 are in `gemm.quantised`.
Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import functools
from typing import NamedTuple

import numpy as np

SIGNED = 128  # what is taken off bytes to make them signed
# The values of iq4_nl and iq4_xs, close together where weights are frequent.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
IQ4 = (IQ4 + SIGNED).astype(np.uint8)


class Layout(NamedTuple):
    """Where the integers of a block are, and what is taken off each.

    Of every 2^run bytes first come the lowest `bits` of each, then the next; the higher bits of an
    integer may be in bytes of their own.
    """

    bits: int
    run: int
    high_bits: int = 8
    high_run: int = 5
    offset: int = 0


def _of_integers(parts):
    """Makes an `unpack_` of the function that takes a block apart: a decorator."""

    @functools.wraps(parts)
    def unpack(*fields):
        scales, minima, *packed = parts(*fields)
        return products(scales, minima, unpacked(*packed))

    unpack.parts = parts  # type: ignore[attr-defined]
    return unpack


def parts_of(blocks, kind):
    """blocks (n,) of a number type -> the arguments of `dequantise` besides the first."""
    numbers = []
    for name, _ in kind.fields:
        field = blocks[name]
        is_half = field.dtype == np.float16
        numbers.append(field.astype(np.float32)[:, None] if is_half else field)
    return globals()[f"unpack_{kind.name}"].parts(*numbers)


def _parts(scales, low, layout, minima=None, high=None):
    """Returns the arguments of `dequantise`: arrays without columns for what there is not."""
    minima = scales[:, :0] if minima is None else minima
    low, high = map(np.ascontiguousarray, (low, low[:, :0] if high is None else high))
    return scales, minima, low, high, layout


def unpacked(low, high, layout):
    """low, high (n, bytes) -> the integers that they hold (n, m), int8."""
    q = _integers(low, layout.bits, 1 << layout.run)
    if high.shape[1]:
        q |= _integers(high, layout.high_bits, 1 << layout.high_run) << layout.bits
    q -= np.uint8(layout.offset)  # modulo 256
    return q.view(np.int8)


def products(scales, minima, q):
    """scales, minima (n, groups), q (n, m) -> their products, less the minima, float32."""
    values = q.astype(np.float32)
    values *= np.repeat(scales, q.shape[1] // scales.shape[1], axis=1)
    if minima.shape[1]:
        values -= np.repeat(minima, q.shape[1] // minima.shape[1], axis=1)
    return values


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


@_of_integers
def unpack_q8_0(scale, q):
    """-> scale * q, q from -127 to 127."""
    return _parts(scale, q.view(np.uint8) ^ SIGNED, Layout(8, 5, offset=SIGNED))


def pack_q8_0(x):
    """Makes the value of largest magnitude +-127; halves are rounded away from zero."""
    scales, inverse = _scaled(np.abs(x), 127)
    scaled = x * inverse
    return scales, np.trunc(scaled + np.copysign(np.float32(0.5), scaled))


@_of_integers
def unpack_q4_0(scale, q):
    """-> scale * (q - 8), q from 0 to 15."""
    return _parts(scale, q, Layout(4, 4, offset=8))


def pack_q4_0(x):
    scales, q = _from_lowest(x, -8)
    return scales, _packed(q)


@_of_integers
def unpack_q4_1(scale, min, q):
    """-> scale * q + min, q from 0 to 15."""
    return _parts(scale, q, Layout(4, 4), -min)


def pack_q4_1(x):
    scales, low, q = _from_min(x, 15)
    return scales, low, _packed(q)


@_of_integers
def unpack_q5_0(scale, high, q):
    """-> scale * (q - 16), q from 0 to 31, their highest bits in `high`, the first one lowest."""
    return _parts(scale, q, Layout(4, 4, offset=16), high=_bits(high))


def pack_q5_0(x):
    scales, q = _from_lowest(x, -16)
    return scales, _highest_bits(q), _packed(q & 15)


@_of_integers
def unpack_q5_1(scale, min, high, q):
    """-> scale * q + min, q as in q5_0."""
    return _parts(scale, q, Layout(4, 4), -min, _bits(high))


def pack_q5_1(x):
    scales, low, q = _from_min(x, 31)
    return scales, low, _highest_bits(q), _packed(q & 15)


@_of_integers
def unpack_q2_K(scales, q, scale, min):
    """-> scale * s * q - min * m, q from 0 to 3, s and m of 16 values in a byte of `scales`."""
    return _parts(scale * (scales & 15), q, Layout(2, 5), min * (scales >> 4))


@_of_integers
def unpack_q3_K(high, q, scales, scale):
    """-> scale * (s - 32) * (q - 4), s of 16 values from 0 to 63, q from 0 to 7."""
    s = _integers(scales[:, :8], 4, 8) | _integers(scales[:, 8:], 2, 4) << 4
    return _parts(scale * (s.view(np.int8) - 32), q, Layout(2, 5, 1, 5, 4), high=high)


@_of_integers
def unpack_q4_K(scale, min, scales, q):
    """-> scale * s * q - min * m, q from 0 to 15, s and m of 32 values from 0 to 63."""
    s, m = _six_bits(scales)
    return _parts(scale * s, q, Layout(4, 5), min * m)


@_of_integers
def unpack_q5_K(scale, min, scales, high, q):
    """-> scale * s * q - min * m, q from 0 to 31, s and m as in q4_K."""
    s, m = _six_bits(scales)
    return _parts(scale * s, q, Layout(4, 5, 1, 5), min * m, high)


@_of_integers
def unpack_q6_K(q, high, scales, scale):
    """-> scale * s * (q - 32), s of 16 values from -128 to 127, q from 0 to 63."""
    return _parts(scale * scales, q, Layout(4, 6, 2, 5, 32), high=high)


@_of_integers
def unpack_iq4_nl(scale, index):
    """-> scale * value."""
    return _parts(scale, np.take(IQ4, _integers(index, 4, 16)), Layout(8, 5, offset=SIGNED))


@_of_integers
def unpack_iq4_xs(scale, high, scales, index):
    """-> scale * (s - 32) * value, s of 32 values from 0 to 63."""
    s = _integers(scales, 4, 1) | _integers(high, 2, 1) << 4
    values = np.take(IQ4, _integers(index, 4, 16))
    return _parts(scale * (s.view(np.int8) - 32), values, Layout(8, 5, offset=SIGNED))


def _integers(q, bits, run):
    """(n, m) bytes -> (n, 8 m / bits): of each `run` bytes the lowest bits, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
    # Contiguous bytes, and runs that are copied as items, take half the time.
    runs = (np.ascontiguousarray(q) >> shifts & 2**bits - 1).view(f"V{run}")
    return np.ascontiguousarray(runs.transpose(1, 2, 0)).view(np.uint8).reshape(len(q), -1)


def _bits(words):
    """(n, 4) bytes -> their bits (n, 32), the lowest first, as bytes."""
    bits = np.unpackbits(words.reshape(-1), bitorder="little")  # an axis of four takes longer
    return bits.reshape(-1, 32)


def _highest_bits(q):
    return np.packbits((q >> 4).reshape(-1), bitorder="little").reshape(len(q), -1)


def _six_bits(packed):
    """(n, 12) bytes -> scales and minima (n, 8); the last four have their highest bits apart."""

    def joined(first, low):
        last = low & 0x0F0F0F0F | first >> 2 & 0x30303030
        return np.stack([first & 0x3F3F3F3F, last], axis=1).view(np.uint8)

    scales, minima, low = packed.view(np.uint32).T  # four bytes at a time
    return joined(scales, low), joined(minima, low >> 4)


def _packed(q):
    """(n, 32) integers from 0 to 15 -> (n, 16) bytes."""
    half = q.shape[1] // 2
    return q[:, :half] | q[:, half:] << 4


def _scaled(x, extreme):
    """x (n, 32) -> scales (n,) with which the largest magnitude is `extreme`; (n, 1) 1 / scale."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    scales = largest / np.float32(extreme)
    return scales[:, 0], _inverse(scales)


def _inverse(scales):
    """-> 1 / scales; 0 where that is not finite, as such values are zeros in float16."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def _from_lowest(x, lowest):
    """x (n, 32) -> scales (n,), integers (n, 32) from 0 on, of which 0 means `lowest`.

    The value of largest magnitude becomes the lowest, whatever its sign: it has no positive twin.
    """
    scales, inverse = _scaled(x, lowest)
    # In float64: whether the products are rounded before the addition depends on the CPU.
    scaled = x.astype(np.float64) * inverse + (0.5 - lowest)
    return scales, np.clip(np.trunc(scaled), 0, -2 * lowest - 1).astype(np.uint8)


def _from_min(x, most):
    """x (n, 32) -> scales, minima (n,), integers (n, 32) from 0, the minimum, to `most`."""
    low = x.min(axis=1, keepdims=True)
    scales = (x.max(axis=1, keepdims=True) - low) / np.float32(most)
    q = np.trunc((x - low) * _inverse(scales) + np.float32(0.5))
    return scales[:, 0], low[:, 0], np.clip(q, 0, most).astype(np.uint8)
