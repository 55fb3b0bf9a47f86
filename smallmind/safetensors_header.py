"""The header of a safetensors file: which tensors it holds. Needs no NumPy."""

import json
import math
from typing import Any, BinaryIO

MAX_HEADER = 3_000_000  # bytes: 20,000 tensors; a hostile header is rejected within a second


def read_header(file: BinaryIO, size: int) -> tuple[bytes, dict[str, Any]]:
    """A file of this size, at its start -> length and header as in the file, the parsed header.

    ValueError if it has another format.
    """
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if size < 8 or length > size - 8:
        raise ValueError("it is truncated or has another format")
    if length > MAX_HEADER:
        raise ValueError(f"its header has {length:,} bytes; at most {MAX_HEADER:,} are read")
    encoded = file.read(length)
    header = from_json(encoded)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return start + encoded, header


def from_json(text: str | bytes) -> Any:
    """JSON text -> value. ValueError if it is malformed, ambiguous or nested too deeply."""
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_table,
            parse_constant=_finite,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key appears twice in one JSON object")
    return table


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number in JSON is not finite")
    return value
