"""A pool of arrays that are rented and returned, so that a training step allocates nothing."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smallmind.kernels.alignment import ALIGNMENT, aligned_empty

MOST_REQUESTS = 4096  # sizes that a pool remembers the buckets of


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


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool has done and holds. Units: bytes, whole buckets."""

    rents: int
    hits: int  # rents that were served without allocating
    bytes_held: int  # rented and idle
    bytes_rented: int
    high_water_mark: int  # the most bytes that were ever rented at one time

    @property
    def misses(self) -> int:
        """Rents that had to allocate."""
        return self.rents - self.hits


class _Bucket:
    """The arrays of one size and dtype that wait to be rented."""

    __slots__ = ("dtype", "idle", "nbytes", "size")

    def __init__(self, size: int, dtype: np.dtype) -> None:
        self.size = size
        self.dtype = dtype
        self.nbytes = size * dtype.itemsize + ALIGNMENT
        self.idle: list[np.ndarray] = []


class TensorPool:
    """Arrays by bucket and dtype. Safe to use from several threads.

    `capacity` is the most bytes that it may hold, rented and idle; None: no limit. At the limit
    idle arrays make way for others; MemoryError where that is not enough. After `close`, also at
    the end of a `with` block, everything but `statistics` raises RuntimeError.

    `TensorPool.shared` is the one that models use.
    """

    shared: ClassVar["TensorPool"]

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._buckets: dict[tuple[int, np.dtype], _Bucket] = {}
        self._requests: dict[tuple[int, Any], _Bucket] = {}  # the buckets of what was asked for
        # By the identity of the memory that an array views, which lives as long as it is in here.
        self._rented: dict[int, tuple[_Bucket, np.ndarray, int]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._rents = self._misses = 0
        self._bytes_held = self._bytes_rented = self._high_water_mark = 0

    def rent(self, n: int, dtype: Any = np.float32) -> np.ndarray:
        """n elements of dtype -> a 1-D array of them, aligned to 64 bytes, with stale contents.

        MemoryError where it would exceed the capacity.
        """
        with self._lock:
            bucket = self._requests.get((n, dtype)) or self._bucket(n, dtype)
            if bucket.idle:
                array = bucket.idle.pop()
            else:
                array = self._allocate(bucket)
                self._misses += 1
            self._rents += 1
            self._bytes_rented = rented = self._bytes_rented + bucket.nbytes
            if rented > self._high_water_mark:
                self._high_water_mark = rented
            self._rented[id(array.base)] = bucket, array, n
        return array[:n]  # a view always: its holder may give it another shape

    def return_(self, array: np.ndarray, clear: bool = True) -> None:
        """Gives back an array from `rent`, of any shape by now; zeroed first where clear.

        ValueError, and nothing is done, for an array that is not rented from this pool, was
        returned already, or is only a part of what was rented.
        """
        place = id(array.base)
        with self._lock:
            rented = self._rented.get(place)
            if rented is None:
                self._check_open()
                raise ValueError(
                    "this array is not rented from this pool: returned twice, or foreign"
                )
            bucket, whole, n = rented
            if array.size != n:
                raise ValueError(f"{n} elements were rented; this array has {array.size} of them")
            # Before anyone else can have it.
            if clear:
                whole[:n] = 0
            del self._rented[place]
            self._bytes_rented -= bucket.nbytes
            bucket.idle.append(whole)

    @contextmanager
    def borrow(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Iterator[np.ndarray]:
        """`with pool.borrow((B, T)) as x:` rents for the length of the block."""
        array = self.rent(math.prod(shape) if isinstance(shape, tuple) else shape, dtype)
        try:
            yield array.reshape(shape)
        finally:
            self.return_(array, clear=False)

    def trim(self) -> int:
        """Frees all idle arrays -> the bytes that this gave back."""
        with self._lock:
            self._check_open()
            return self._trim()

    def close(self) -> None:
        """Frees all idle arrays for good. Those still rented live as long as someone holds them."""
        with self._lock:
            self._closed = True
            self._trim()
            self._rented.clear()
            self._requests.clear()
            self._bytes_held = self._bytes_rented = 0

    def __enter__(self) -> "TensorPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> PoolStatistics:
        """What has happened so far."""
        with self._lock:
            return PoolStatistics(
                rents=self._rents,
                hits=self._rents - self._misses,
                bytes_held=self._bytes_held,
                bytes_rented=self._bytes_rented,
                high_water_mark=self._high_water_mark,
            )

    def _bucket(self, n: int, dtype: Any) -> _Bucket:
        """The bucket for n elements of a dtype, which has many names: float, "f4", np.float32."""
        self._check_open()
        key = bucket_size(n), np.dtype(dtype)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(*key)
        if len(self._requests) == MOST_REQUESTS:
            self._requests.clear()
        self._requests[n, dtype] = bucket
        return bucket

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the pool is closed")

    def _allocate(self, bucket: _Bucket) -> np.ndarray:
        after = self._bytes_held + bucket.nbytes
        if self.capacity is not None and after > self.capacity:
            after -= self._trim()
            if after > self.capacity:
                raise MemoryError(
                    f"the pool may hold {self.capacity:,} bytes, {self._bytes_rented:,} are "
                    f"rented and {bucket.nbytes:,} more were asked for"
                )
        array = aligned_empty(bucket.size, bucket.dtype)
        self._bytes_held = after
        return array

    def _trim(self) -> int:
        freed = 0
        for bucket in self._buckets.values():
            freed += len(bucket.idle) * bucket.nbytes
            bucket.idle.clear()
        self._bytes_held -= freed
        return freed


TensorPool.shared = TensorPool()
