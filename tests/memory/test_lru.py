"""Values that are kept up to a number of bytes."""

from hypothesis import given
from hypothesis import strategies as st

from smallmind.memory.lru import LRU


def test_the_least_recently_used_value_is_dropped_first():
    made = []
    cache = LRU(10, len)

    def get(key, size=4):
        return cache.get(key, lambda: made.append(key) or bytes(size))

    for key in "abacab":  # c displaces b, which was not used since
        get(key)
    assert made == ["a", "b", "c", "b"]
    assert len(get("large", 11)) == 11 and cache.nbytes == 8
    get("large", 11)
    assert made[-2:] == ["large", "large"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12))), st.integers(0, 20))
def test_what_is_kept_never_exceeds_the_limit(requests, limit):
    cache, sizes = LRU(limit, len), {}
    for key, size in requests:
        value = cache.get(key, lambda size=size: bytes(size))
        assert value == bytes(size) or key in sizes
        sizes[key] = size
        assert 0 <= cache.nbytes <= limit
        assert len(cache) <= len(sizes)
