"""Tensors compressed with zlib, from which the same bits come back.

The bytes of each number are apart: first the lowest byte of all numbers, then the next ones. Only
the highest one, with sign and exponent, becomes smaller: it takes a third of its size afterwards.
"""

import json
import math
import zlib
from typing import Any

import numpy as np

from smallmind.checks import from_json

# Finds runs of a byte, such as moments of zero, and no other repetitions: weights have none, and
# looking for them takes twice as long.
STRATEGY = zlib.Z_RLE
MAX_RATIO = 1100  # bytes that one compressed byte can stand for, a little more than zlib's limit
MAX_KIND = 1000  # bytes that say which type and shape a tensor has


def compress(tensor: np.ndarray, dtype: str) -> np.ndarray:
    """tensor, the name of its type -> uint8 (n,): type and shape as a line of JSON, then zlib's."""
    by_number = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    zipped = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, STRATEGY)
    pieces = [json.dumps([dtype, list(tensor.shape)]).encode() + b"\n"]
    for byte in range(tensor.itemsize):
        pieces.append(zipped.compress(by_number[byte :: tensor.itemsize].tobytes()))
    pieces.append(zipped.flush())
    return np.frombuffer(b"".join(pieces), np.uint8)


def decompress(packed: np.ndarray, dtypes: dict[str, Any]) -> np.ndarray:
    """Undoes `compress`. ValueError if the bytes are anything else than what it returned."""
    content = packed.tobytes()
    kind, line_end, _ = content[:MAX_KIND].partition(b"\n")
    described = from_json(kind) if line_end else None
    if not isinstance(described, list) or len(described) != 2:
        raise ValueError("a compressed tensor does not begin with its type and shape")
    name, shape = described
    is_known = isinstance(name, str) and name in dtypes and isinstance(shape, list)
    if not is_known or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError("a compressed tensor has an unknown type or an invalid shape")
    dtype = np.dtype(dtypes[name])
    count = math.prod(shape)
    if count * dtype.itemsize > MAX_RATIO * len(content):
        raise ValueError("a compressed tensor is smaller than its shape allows")
    tensor = np.empty(count, dtype)
    by_number = tensor.view(np.uint8)
    stream, rest = zlib.decompressobj(), memoryview(content)[len(kind) + 1 :]
    for byte in range(dtype.itemsize if count else 0):
        # At most as many bytes as belong there: a small file cannot take any amount of memory.
        found = _decompress(stream, rest, count)
        rest = memoryview(stream.unconsumed_tail)
        by_number[byte :: dtype.itemsize] = np.frombuffer(found, np.uint8)
    if _decompress(stream, rest, 1, least=0) or not stream.eof or stream.unused_data:
        raise ValueError("a compressed tensor does not fit its shape")
    return tensor.reshape(shape)


def _decompress(stream: Any, rest: memoryview, most: int, least: int | None = None) -> bytes:
    """-> at most this many bytes of a stream, and at least `least`, by default as many."""
    try:
        found = bytes(stream.decompress(rest, most))
    except zlib.error as error:
        raise ValueError(f"a compressed tensor is damaged: {error}") from None
    if len(found) < (most if least is None else least):
        raise ValueError("a compressed tensor does not fit its shape")
    return found
