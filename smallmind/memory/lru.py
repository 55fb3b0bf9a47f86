"""Values that took long to get, as many of them as fit in a number of bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRU(Generic[Value]):
    """Values by key, of at most `limit` bytes together: those used last.

    `size` says how many bytes a value takes. One that is larger than the limit is not kept.
    """

    def __init__(self, limit: int, size: Callable[[Value], int]) -> None:
        self.limit = limit
        self.nbytes = 0
        self._size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()  # the one used last at the end

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made by `make` if it is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        size = self._size(value)
        if size <= self.limit:
            self._values[key] = value
            self.nbytes += size
        while self.nbytes > self.limit:
            _, dropped = self._values.popitem(last=False)
            self.nbytes -= self._size(dropped)
        return value
