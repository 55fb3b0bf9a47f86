"""A pool of arrays that are rented and returned, so that a training step allocates nothing."""

import math
import numbers
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smallmind.checks import check_type
from smallmind.console.signals import deferred
from smallmind.kernels.alignment import ALIGNMENT, aligned_empty

MAX_REQUESTS = 4096  # sizes whose bucket a pool remembers


def unbacked(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """shape -> an array that takes no memory: all its elements share one address.

    For dry runs, which only count bytes. It is writable, but its contents are meaningless.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    element = np.zeros(1, dtype)
    return np.ndarray(shape, element.dtype, element, strides=(0,) * len(shape))


def bucket_size(n: int) -> int:
    """Requested elements -> the size of their bucket: 64, 128, ... 65536, then steps of an eighth.

    Up to 65536 a bucket is a power of two; above, at most 12.5 % is wasted.
    """
    if n <= 64:
        return 64
    power = 1 << (n - 1).bit_length()
    if power <= 65536:
        return power
    step = power // 16
    return math.ceil(n / step) * step


@dataclass(frozen=True)
class PoolStatistics:
    """The use of a pool so far, and its present contents. Bytes are those of whole buckets."""

    rents: int
    hits: int  # rents that allocated nothing
    bytes_held: int  # rented and idle
    bytes_rented: int
    high_water_mark: int  # peak of bytes_rented

    @property
    def misses(self) -> int:
        return self.rents - self.hits


class _Bucket:
    """The idle arrays of one size and dtype."""

    __slots__ = ("dtype", "idle", "nbytes", "size")

    def __init__(self, size: int, dtype: np.dtype) -> None:
        self.size = size
        self.dtype = dtype
        self.nbytes = size * dtype.itemsize + ALIGNMENT
        self.idle: list[np.ndarray] = []


class Reservation:
    """Arrays of a pool that are rented together, again and again. See `TensorPool.reserve`.

    Between two rents the pool still has them for others: it takes the reservation apart as soon as
    it would have to allocate.
    """

    __slots__ = ("_lock", "arrays", "in_use", "is_whole", "nbytes")

    def __init__(self, lock: threading.Lock, arrays: list[tuple[_Bucket, np.ndarray]]) -> None:
        self._lock = lock
        self.arrays = arrays
        self.nbytes = sum(bucket.nbytes for bucket, _ in arrays)
        self.is_whole = True
        self.in_use = False

    def rent(self) -> bool:
        """Rents all arrays -> False, with nothing done, if the pool has taken it apart."""
        with self._lock:
            self.in_use = self.is_whole
            return self.in_use

    def return_(self) -> None:
        """Returns what `rent` rented, if it did."""
        self.in_use = False


class TensorPool:
    """Arrays by bucket and dtype. Thread-safe.

    `capacity` limits the bytes that it holds, rented and idle; None: no limit. At the limit idle
    arrays are freed; MemoryError if that is not enough. After `close`, which a `with` block calls
    at its end, everything but `statistics` raises RuntimeError.

    `allocate(elements, dtype)` makes the arrays; with `unbacked` the pool only counts.

    Models use `TensorPool.shared`.
    """

    shared: ClassVar["TensorPool"]

    def __init__(
        self,
        capacity: int | None = None,
        allocate: Callable[[int, Any], np.ndarray] = aligned_empty,
    ) -> None:
        self.capacity = capacity
        self._new_array = allocate
        self._buckets: dict[tuple[int, np.dtype], _Bucket] = {}
        self._requests: dict[tuple[int, Any], _Bucket] = {}  # (n, dtype as given) -> bucket
        # Keyed by the identity of the array's base, which lives as long as the entry.
        self._rented: dict[int, tuple[_Bucket, np.ndarray, int, object]] = {}
        self._reservations: list[Reservation] = []  # their arrays are in no bucket
        self._lock = threading.Lock()
        self._closed = False
        self._rents = self._misses = 0
        self._bytes_held = self._bytes_rented = self._high_water_mark = 0

    def rent(self, n: int, dtype: Any = np.float32, owner: object = None) -> np.ndarray:
        """-> a 1-D array of n elements, aligned to 64 bytes, contents undefined.

        With an owner, `return_all(owner)` also returns it, even if an interrupt kept the array from
        the caller. MemoryError if it would exceed the capacity.
        """
        with self._lock:
            try:
                bucket = self._requests.get((n, dtype)) or self._bucket(n, dtype)
            except TypeError:
                check_type("n", n, numbers.Integral)
                raise
            if not bucket.idle and self._reservations:
                self._end_reservations()
            idle = bucket.idle
            array = idle[-1] if idle else self._allocate(bucket)
            key = id(array.base)
            # Ctrl-C is noticed after a call. There is none from here to the end of the block, so
            # that all of it is done or nothing.
            if idle:
                del idle[-1]
            else:
                self._bytes_held += bucket.nbytes
                self._misses += 1
            self._rents += 1
            self._bytes_rented = rented = self._bytes_rented + bucket.nbytes
            if rented > self._high_water_mark:
                self._high_water_mark = rented
            self._rented[key] = bucket, array, n, owner
        return array[:n]  # always a view: the caller may reshape it in place

    def return_(self, array: np.ndarray, clear: bool = True) -> None:
        """Returns an array from `rent`, of any shape; zeroes it first if clear.

        ValueError, with nothing done, if the array is not rented from this pool, was already
        returned, or is only a part of what was rented.
        """
        key = id(getattr(array, "base", None))
        with self._lock:
            rented = self._rented.get(key)
            if rented is None:
                self._check_open()
                raise ValueError(
                    "this array is not rented from this pool: returned twice, or foreign"
                )
            bucket, whole, n, _ = rented
            if array.size != n:
                raise ValueError(f"{n} elements were rented; this array has {array.size} of them")
            # Before another thread can rent it.
            if clear:
                whole[:n] = 0
            # As in `rent`: nothing can come in between.
            del self._rented[key]
            self._bytes_rented -= bucket.nbytes
            bucket.idle.append(whole)

    def return_all(self, owner: object) -> None:
        """Returns every array that is still rented for an owner; does nothing if there is none.

        If an interrupt ends it early, calling it again returns the rest.
        """
        with self._lock:
            arrays = [array[:n] for _, array, n, other in self._rented.values() if other is owner]
        for array in arrays:
            self.return_(array, clear=False)

    def reserve(self, arrays: Iterable[np.ndarray]) -> Reservation | None:
        """Arrays that were rented before -> the way to rent the same ones again, all at once.

        None if not all of them are idle. Other reservations that are not in use end.
        """
        wanted = {id(array.base) for array in arrays}
        with self._lock, deferred():
            self._check_open()
            self._end_reservations()
            buckets = self._buckets.values()
            found = [
                (bucket, array)
                for bucket in buckets
                for array in bucket.idle
                if id(array.base) in wanted
            ]
            if len(found) < len(wanted):
                return None
            for bucket in buckets:
                bucket.idle = [array for array in bucket.idle if id(array.base) not in wanted]
            reservation = Reservation(self._lock, found)
            self._reservations.append(reservation)
            return reservation

    @contextmanager
    def borrow(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Iterator[np.ndarray]:
        """Rents for the duration of the block: `with pool.borrow((B, T)) as x:`."""
        owner = object()
        n = math.prod(shape) if isinstance(shape, tuple) else shape
        try:
            yield self.rent(n, dtype, owner).reshape(shape)
            self.return_all(owner)
        except BaseException:
            self.return_all(owner)  # once more, if an interrupt came during the first time
            raise

    def trim(self) -> int:
        """Frees all idle arrays -> the number of bytes freed."""
        with self._lock:
            self._check_open()
            return self._trim()

    def close(self) -> None:
        """Frees all idle arrays. Rented ones live as long as someone refers to them."""
        with self._lock:
            self._closed = True
            self._trim()
            for reservation in self._reservations:
                reservation.is_whole = False
            self._reservations.clear()
            self._rented.clear()
            self._requests.clear()
            self._bytes_held = self._bytes_rented = 0

    def __enter__(self) -> "TensorPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> PoolStatistics:
        with self._lock:
            reserved = sum(each.nbytes for each in self._reservations if each.in_use)
            return PoolStatistics(
                rents=self._rents,
                hits=self._rents - self._misses,
                bytes_held=self._bytes_held,
                bytes_rented=self._bytes_rented + reserved,
                high_water_mark=self._high_water_mark,
            )

    def _bucket(self, n: int, dtype: Any) -> _Bucket:
        """-> the bucket for n elements of a dtype, however it is spelled: "f4", np.float32, ..."""
        self._check_open()
        if check_type("n", n, numbers.Integral) < 0:
            raise ValueError(f"n={n} must be at least 0")
        key = bucket_size(n), np.dtype(dtype)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(*key)
        if len(self._requests) == MAX_REQUESTS:
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
                    f"rented and {bucket.nbytes:,} more are needed: use smaller batches, or raise "
                    "the capacity"
                )
        return self._new_array(bucket.size, bucket.dtype)

    def _end_reservations(self) -> None:
        """Makes the arrays of all reservations that are not in use idle."""
        with deferred():
            for reservation in self._reservations:
                if reservation.in_use:
                    continue
                reservation.is_whole = False
                for bucket, array in reservation.arrays:
                    bucket.idle.append(array)
            self._reservations = [each for each in self._reservations if each.is_whole]

    def _trim(self) -> int:
        if self._reservations:
            self._end_reservations()
        before = self._bytes_held
        for bucket in self._buckets.values():
            nbytes = len(bucket.idle) * bucket.nbytes
            bucket.idle = []  # no call before the next line: see `rent`
            self._bytes_held -= nbytes
        return before - self._bytes_held


TensorPool.shared = TensorPool()
