from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.memory.tensor_pool import TensorPool, bucket_size
from tests.threads import in_threads


@given(st.integers(1, 10**9))
def test_buckets_are_large_enough_and_waste_little(n):
    size = bucket_size(n)
    assert size >= n
    if n <= 65536:
        assert size in {64 << k for k in range(11)}
    else:
        assert size <= n * 1.125
    assert bucket_size(size) == size


def test_a_returned_array_is_rented_again():
    pool = TensorPool()
    first = pool.rent(1000)
    assert first.shape == (1000,) and first.dtype == np.float32
    assert first.ctypes.data % 64 == 0
    pool.return_(first)
    second = pool.rent(1024)
    assert np.shares_memory(first, second)
    assert pool.statistics().misses == 1


def test_rented_arrays_never_overlap():
    pool = TensorPool()
    arrays = [pool.rent(n) for n in (1, 64, 65, 1000, 1000, 70000)]
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in arrays[:i])


def test_contents_stay_unless_cleared():
    pool = TensorPool()
    for clear in (True, False):
        array = pool.rent(64)
        array[:] = 5
        pool.return_(array, clear=clear)
    assert (pool.rent(64) == 5).all()
    other = TensorPool()
    array = other.rent(64)
    array[:] = 5
    other.return_(array)
    assert (other.rent(64) == 0).all()


def test_a_reshaped_array_can_be_returned():
    pool = TensorPool()
    matrix = pool.rent(64).reshape(4, 16)
    pool.return_(matrix)
    array = pool.rent(64)
    assert np.shares_memory(array, matrix)
    array.shape = (8, 8)  # in place, which does not affect later rents
    pool.return_(array)
    assert pool.rent(64).shape == (64,)


def test_returning_a_part_or_twice_or_a_foreign_array_raises():
    pool = TensorPool()
    array = pool.rent(100)
    with pytest.raises(ValueError, match="100 elements were rented; this array has 10 of them"):
        pool.return_(array[:10])
    pool.return_(array)
    for wrong in (array, np.zeros(10), TensorPool().rent(10)):
        with pytest.raises(ValueError, match="not rented from this pool"):
            pool.return_(wrong)


def test_borrow_returns_even_after_an_error():
    pool = TensorPool()
    with pytest.raises(RuntimeError), pool.borrow((3, 4)) as x:
        assert x.shape == (3, 4)
        raise RuntimeError
    with pool.borrow((4, 3)) as y:
        assert np.shares_memory(x, y)


def test_dtypes_do_not_share_buckets():
    pool = TensorPool()
    pool.return_(pool.rent(64, np.float32))
    assert pool.rent(64, np.float64).dtype == np.float64


def test_a_dtype_may_be_spelled_in_several_ways():
    pool = TensorPool()
    first = pool.rent(64, "f4")
    pool.return_(first)
    assert np.shares_memory(pool.rent(64, np.dtype(np.float32)), first)
    assert pool.trim() == 0


def test_statistics_count_what_happens():
    pool = TensorPool()
    a, b = pool.rent(64), pool.rent(1000, np.float64)
    whole = pool.statistics()
    assert (whole.rents, whole.hits, whole.misses) == (2, 0, 2)
    assert whole.bytes_rented == whole.bytes_held == whole.high_water_mark
    assert 64 * 4 + 1024 * 8 <= whole.bytes_held <= 64 * 4 + 1024 * 8 + 2 * 64
    pool.return_(a)
    pool.return_(b)
    c = pool.rent(60)
    later = pool.statistics()
    assert (later.rents, later.hits) == (3, 1)
    assert later.bytes_held == later.high_water_mark == whole.bytes_held
    assert later.bytes_rented == 64 * 4 + 64
    pool.return_(c)


def test_trim_frees_only_idle_arrays():
    pool = TensorPool()
    kept, idle = pool.rent(1000), pool.rent(1000)
    pool.return_(idle)
    held = pool.statistics().bytes_held
    assert pool.trim() == held // 2
    assert pool.trim() == 0
    assert pool.statistics().bytes_held == pool.statistics().bytes_rented == held // 2
    pool.return_(kept)
    assert np.shares_memory(pool.rent(1000), kept)


def test_the_capacity_is_never_exceeded():
    pool = TensorPool(capacity=9_000)
    first = pool.rent(1024)
    pool.return_(pool.rent(256))
    second = pool.rent(1024)  # the idle array is freed
    assert pool.statistics().bytes_held <= 9_000
    with pytest.raises(MemoryError, match="may hold 9,000 bytes, 8,320 are rented and 1,088 more"):
        pool.rent(256)
    pool.return_(second)
    third = pool.rent(256)
    assert pool.statistics().bytes_rented == first.nbytes + third.nbytes + 2 * 64


def test_a_closed_pool_raises():
    with TensorPool() as pool:
        array = pool.rent(64)
        pool.return_(pool.rent(128))
    for use in (lambda: pool.rent(64), lambda: pool.return_(array), pool.trim):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    array[:] = 1  # still belongs to its holder
    assert pool.statistics().bytes_held == 0
    pool.close()


def test_several_threads_never_get_the_same_array():
    pool, errors = TensorPool(), []

    def work(number):
        random = np.random.default_rng(number)
        for _ in range(300):
            with pool.borrow(int(random.integers(1, 200))) as array:
                array[:] = number
                if not (array == number).all():
                    errors.append(number)

    in_threads(*(partial(work, number) for number in range(8)))
    assert not errors
    statistics = pool.statistics()
    assert statistics.rents == 8 * 300 and statistics.bytes_rented == 0


def test_reserved_arrays_are_rented_together():
    pool = TensorPool()
    arrays = [pool.rent(n) for n in (64, 64, 1000)]
    assert pool.reserve(arrays[:1]) is None  # still rented
    for array in arrays:
        pool.return_(array)
    held = pool.statistics().bytes_held
    reservation = pool.reserve([arrays[0], arrays[2].reshape(10, 100)])
    assert pool.statistics().bytes_rented == 0
    assert reservation.rent()
    assert pool.statistics().bytes_rented == reservation.nbytes
    others = [pool.rent(64), pool.rent(1000)]
    assert np.shares_memory(others[0], arrays[1])
    assert not any(np.shares_memory(other, arrays[i]) for other in others for i in (0, 2))
    assert pool.statistics().bytes_held > held
    reservation.return_()
    assert reservation.rent()  # nothing had to be allocated since
    reservation.return_()


def test_a_reservation_ends_before_anything_is_allocated():
    pool = TensorPool()
    arrays = [pool.rent(64), pool.rent(1000)]
    for array in arrays:
        pool.return_(array)
    held, reservation = pool.statistics().bytes_held, pool.reserve(arrays)
    assert pool.reserve(arrays[:1]).rent()  # ends the other one, as do all below
    assert not reservation.rent() and pool.reserve(arrays) is None
    other = pool.rent(1000)
    assert np.shares_memory(other, arrays[1])
    assert pool.statistics().bytes_held == held


@pytest.mark.parametrize("end", [TensorPool.trim, TensorPool.close, lambda pool: pool.rent(2000)])
def test_reserved_arrays_are_freed_with_the_others_and_at_the_capacity(end):
    pool = TensorPool(capacity=10_000)
    array = pool.rent(1000)
    pool.return_(array)
    reservation = pool.reserve([array])
    end(pool)
    statistics = pool.statistics()
    assert not reservation.rent() and statistics.bytes_held == statistics.bytes_rented
