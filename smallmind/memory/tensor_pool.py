"""A pool of arrays that are rented and returned, so that a training step allocates nothing."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from smallmind.kernels.alignment import ALIGNMENT, aligned_empty


def bucket_size(n: int) -> int:
    """Elements asked for -> elements of their bucket: 64, 128, ... 65536, then steps of an eighth.

    Up to 65536 a bucket is a power of two; beyond it wastes at most 12.5 %.
    """
    if n <= 64:
        return 64
    power = 1 << (n - 1).bit_length()
    if power <= 65536:
        return power
    step = power // 16
    return (n + step - 1) // step * step


class TensorPool:
    """Arrays by bucket and dtype. Safe to use from several threads.

    `TensorPool.shared` is the one that models use.
    """

    shared: ClassVar["TensorPool"]

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, Any], list[np.ndarray]] = defaultdict(list)
        self._rented: dict[int, tuple[tuple[int, Any], np.ndarray]] = {}
        self._lock = threading.Lock()
        self.bytes_held = 0
        self.misses = 0

    def rent(self, n: int, dtype: Any = np.float32) -> np.ndarray:
        """n elements of dtype -> a 1-D array of them, aligned to 64 bytes, with stale contents."""
        key = (bucket_size(n), dtype)
        with self._lock:
            free = self._free[key]
            whole = free.pop() if free else self._allocate(key)
            # Views of an array name the same base: a reshaped array can be returned too.
            self._rented[id(whole.base)] = key, whole
        return whole[:n]

    def return_(self, array: np.ndarray, clear: bool = True) -> None:
        """Gives back an array from `rent`, or a view of all of it; zeroed first where clear.

        ValueError for an array that is not rented from this pool, or was returned already.
        """
        with self._lock:
            rented = self._rented.pop(id(array.base), None)
        if rented is None:
            raise ValueError("this array is not rented from this pool: returned twice, or foreign")
        key, whole = rented
        if clear:
            whole[:] = 0
        with self._lock:
            self._free[key].append(whole)

    @contextmanager
    def borrow(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Iterator[np.ndarray]:
        """`with pool.borrow((B, T)) as x:` rents for the length of the block."""
        array = self.rent(int(np.prod(shape)), dtype)
        try:
            yield array.reshape(shape)
        finally:
            self.return_(array, clear=False)

    def _allocate(self, key: tuple[int, Any]) -> np.ndarray:
        size, dtype = key
        array = aligned_empty(size, dtype)
        self.bytes_held += array.nbytes + ALIGNMENT
        self.misses += 1
        return array


TensorPool.shared = TensorPool()
