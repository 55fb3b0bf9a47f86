"""The safetensors file format, read and written: tensors by name, no code.

Eight bytes of header length (little-endian), a JSON header with dtype, shape and place of every
tensor and a string map `__metadata__`, then the tensors' bytes.
Format: https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from smallmind.config import InputError

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # bytes, the format's own limit


def write(
    path: str | PathLike[str], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes tensors and metadata; an existing file is replaced whole or stays as it was."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in tensors.items():
        end = place + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    encoded = json.dumps(header, ensure_ascii=True).encode()
    encoded += b" " * (-len(encoded) % 8)
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for tensor in tensors.values():
                file.write(np.ascontiguousarray(tensor).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """path -> tensors, metadata. InputError where the file is missing or breaks the format."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise InputError(f"{path} is not a safetensors file, or is cut short")
            header = from_json(file.read(length))
            data = file.read()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise InputError(f"{path} is not a safetensors file: its header is no table")
    try:
        metadata = header.pop("__metadata__", {})
        tensors = {name: _tensor(entry, data) for name, entry in header.items()}
        ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path} is cut short or has a broken header: {error}") from None
    place = 0
    for begin, end in ends:
        if begin != place:
            raise InputError(f"{path} has a broken header: gaps or overlaps between tensors")
        place = end
    if place != len(data):
        raise InputError(f"{path} holds {len(data)} bytes of tensors, its header {place}")
    return tensors, metadata


def _tensor(entry: dict[str, Any], data: bytes) -> np.ndarray:
    dtype = np.dtype(DTYPES[entry["dtype"]])
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)):
        raise ValueError("shapes and offsets must be whole numbers")
    if end - begin != math.prod(shape) * dtype.itemsize or end > len(data):
        raise ValueError("a tensor's offsets do not fit its shape")
    return np.frombuffer(data, dtype, math.prod(shape), begin).reshape(shape)


def to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def from_json(text: str | bytes) -> Any:
    """JSON text -> value; ValueError where it is malformed or nested beyond reason."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
