"""The header of a safetensors file: which tensors it holds. Needs no NumPy."""

from typing import Any, BinaryIO

from smallmind.checks import from_json

MAX_HEADER = 3_000_000  # bytes: 20,000 tensors; a hostile header is rejected within a second


def read_header(file: BinaryIO, size: int) -> tuple[bytes, dict[str, Any]]:
    """A file of this size, at its start -> length and header as in the file, the parsed header."""
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
