"""Arrays that start on a cache line, so that no vector of them straddles two."""

import math
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and a vector of the widest instruction set
# Bytes from which an array has a mapping of its own. The heap of the C library would keep the
# memory of one that is freed below another: 30 of 350 MB where a model is timed before training.
MIN_MAPPED_BYTES = 2**20
MIN_HUGE_PAGE_BYTES = 2**22  # bytes from which it is worth huge pages, where the system has them


def aligned_empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """shape -> a contiguous array on a cache line, contents undefined."""
    return _aligned(np.empty, shape, dtype)


def aligned_zeros(
    shape: int | tuple[int, ...], dtype: Any = np.float32, in_parts: bool = False
) -> np.ndarray:
    """shape -> a contiguous array of zeros on a cache line. Untouched pages take no memory yet.

    One that is written `in_parts`, far from each other, has no huge pages: each part would take
    one.
    """
    return _aligned(np.zeros, shape, dtype, in_parts)


def give_back(part: np.ndarray) -> None:
    """Gives the memory of a contiguous part of `aligned_zeros` back to the system.

    Its contents are undefined then. What shares a page with others stays, and so does all of a
    small array, or what the system wants to keep.
    """
    whole = part
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    mapping: Any = getattr(whole.base, "obj", whole.base)  # of a memoryview
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = part.ctypes.data - whole.ctypes.data
    end = (begin + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin < end:
        with suppress(OSError):  # locked pages stay
            mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _aligned(
    allocate: Callable[..., np.ndarray],
    shape: int | tuple[int, ...],
    dtype: Any,
    in_parts: bool = False,
) -> np.ndarray:
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = _mapped(nbytes, in_parts) if nbytes >= MIN_MAPPED_BYTES else None
    if raw is None:
        raw = allocate(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _mapped(nbytes: int, in_parts: bool) -> np.ndarray | None:
    """Zeros in a mapping of their own, which goes back to the system with the last view of them.

    None where the system refuses: NumPy then says how much memory is missing.
    """
    try:
        # Windows knows no flags: a mapping without a file is private there unless it is named.
        flags = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        mapping = mmap.mmap(-1, nbytes, **flags)
    except (OSError, OverflowError):
        return None
    advice = "MADV_NOHUGEPAGE" if in_parts else "MADV_HUGEPAGE"
    if nbytes >= MIN_HUGE_PAGE_BYTES and hasattr(mmap, advice):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(getattr(mmap, advice))
    return np.frombuffer(mapping, np.uint8)
