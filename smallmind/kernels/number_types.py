"""Number types as arrays, and their conversion in plain NumPy, by the table in `parts`.

NumPy has no bfloat16 and Numba no float16, so arrays hold the bits: uint16 those of float16, int16
those of bfloat16. 16 bits are a storage format only: kernels convert to float32 as they load, and
back as they store. An array of blocks has a number type for each kind of block, so that one of
shape (N, K / block) holds N rows of K values.
"""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from smallmind.parts import NUMBER_TYPES, NumberType

FLOAT16 = np.uint16
BFLOAT16 = np.int16
BLOCK = 32  # values that share a scale, in all types that are computed with
HALF = BLOCK // 2
GROUP = 16  # rows of blocks that products with few rows read together
AT_ONCE = 2**16  # values that are converted at a time: they stay in a core's cache

DTYPES = {
    name: np.dtype(kind.fields if kind.block > 1 else kind.item)
    for name, kind in NUMBER_TYPES.items()
}
_KINDS = {dtype: NUMBER_TYPES[name] for name, dtype in DTYPES.items()}


def kind_of(dtype: Any) -> NumberType | None:
    """Returns the number type of an array's items; None for one that no file of weights has."""
    return _KINDS.get(np.dtype(dtype))


def is_quantised(dtype: Any) -> bool:
    """Returns True for the number type of a block."""
    return np.dtype(dtype).names is not None


def _codec(direction: str, kind: NumberType) -> Any:
    # Imported here, so that the machine code of no kernel depends on it.
    codecs = importlib.import_module("smallmind.kernels.codecs")
    return getattr(codecs, f"{direction}_{kind.name}")


def to_float32(array: np.ndarray) -> np.ndarray:
    """array (..., n) of any number type -> its values (..., n block) as float32.

    An array of float32 or float64 is returned unchanged.
    """
    kind = kind_of(array.dtype)
    if kind is None or kind.precision == "float32":
        return array
    unpack = _codec("unpack", kind)
    if not is_quantised(array.dtype):
        return unpack(array)
    blocks = np.ascontiguousarray(array).reshape(-1)
    values = np.empty((len(blocks), kind.block), np.float32)
    for part, into in zip(_parts(blocks, kind), _parts(values, kind), strict=True):
        into[...] = unpack(*(_numbers(part[name]) for name, _ in kind.fields))
    return values.reshape(*array.shape[:-1], array.shape[-1] * kind.block)


def _parts(rows: np.ndarray, kind: NumberType) -> Iterator[np.ndarray]:
    step = AT_ONCE // kind.block
    return (rows[first : first + step] for first in range(0, len(rows), step))


def _numbers(field: np.ndarray) -> np.ndarray:
    """Scales (n,) -> (n, 1) float32; integers unchanged."""
    return field.astype(np.float32)[:, None] if field.dtype == np.float16 else field


def round_to(values: np.ndarray, dtype: Any) -> np.ndarray:
    """values (..., n block) float32 -> (..., n) of any number type, rounded to nearest."""
    kind = kind_of(dtype)
    if kind is None or kind.precision == "float32":
        return values.astype(dtype)
    pack = _codec("pack", kind)
    if not is_quantised(dtype):
        return pack(values)
    x = np.ascontiguousarray(values, np.float32).reshape(-1, kind.block)
    blocks = np.empty(len(x), dtype)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for part, into in zip(_parts(x, kind), _parts(blocks, kind), strict=True):
            for (name, _), field in zip(kind.fields, pack(part), strict=True):
                into[name] = field
    return blocks.reshape(*values.shape[:-1], values.shape[-1] // kind.block)


def in_groups(w: np.ndarray, is_back: bool = False) -> np.ndarray:
    """Blocks (N, n) -> the same bytes, each GROUP whole rows of them rearranged, or as before.

    A group begins with all scales: those of the first blocks, then of the blocks that follow. The
    integers of each block come after them in the same way, four bytes of each row at a time.
    """
    whole, n, size = len(w) // GROUP, w.shape[1], w.dtype.itemsize
    found, count, scale = w.copy(), size // 4, size % 4
    rows = np.ascontiguousarray(w[: whole * GROUP]).view(np.uint8).reshape(whole, GROUP * n * size)
    groups = found[: whole * GROUP].view(np.uint8).reshape(whole, GROUP * n * size)
    end = GROUP * n * scale
    plain, grouped = (groups, rows) if is_back else (rows, groups)
    blocks = plain.reshape(whole, GROUP, n, size)
    words = grouped[:, end:].reshape(whole, n, count, GROUP, 4).transpose(0, 3, 1, 2, 4)
    scales = grouped[:, :end].reshape(whole, n, GROUP, scale).transpose(0, 2, 1, 3)
    of_words = blocks[..., scale:].reshape(whole, GROUP, n, count, 4)
    for before, after in ((of_words, words), (blocks[..., :scale], scales)):
        target, source = (before, after) if is_back else (after, before)
        target[...] = source
    return found


def integers(blocks: np.ndarray) -> np.ndarray:
    """blocks (n,) -> their values over their scales (n, BLOCK), int8."""
    unscaled = blocks.copy()
    unscaled["scale"] = 1
    return to_float32(unscaled).astype(np.int8).reshape(-1, BLOCK)


def is_finite(array: np.ndarray) -> bool:
    """Returns True unless a value, in any number type, is infinite or NaN."""
    if fields := array.dtype.names:
        scales = (array[name] for name in fields if array.dtype[name] == np.float16)
        return all(is_finite(scale.view(FLOAT16)) for scale in scales)
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    magnitude = bits.dtype.type(2 ** (8 * array.itemsize - 1) - 1)  # all but the sign
    return int((bits & magnitude).max(initial=0)) < _infinity(array.dtype)


@functools.cache
def _infinity(dtype: Any) -> int:
    """Returns the bits of infinity. Those of NaN are larger, those of all others smaller."""
    return int(round_to(np.array([np.inf], np.float32), dtype).view(f"u{dtype.itemsize}")[0])
