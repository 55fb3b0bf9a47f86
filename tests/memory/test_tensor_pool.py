import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind.memory.tensor_pool import TensorPool, bucket_size


@given(st.integers(1, 10**9))
def test_buckets_hold_what_is_asked_for_and_waste_little(n):
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
    assert pool.misses == 1


def test_rented_arrays_never_overlap():
    pool = TensorPool()
    arrays = [pool.rent(n) for n in (1, 64, 65, 1000, 1000, 70000)]
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in arrays[:i])


def test_clear_zeroes_and_otherwise_contents_stay():
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
    matrix = pool.rent(600).reshape(20, 30)
    pool.return_(matrix)
    assert np.shares_memory(pool.rent(600), matrix)


def test_returning_twice_or_a_foreign_array_raises():
    pool = TensorPool()
    array = pool.rent(10)
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
