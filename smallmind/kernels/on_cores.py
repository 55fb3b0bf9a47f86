"""Work in plain Python and NumPy on several threads: results come in the order of the items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from smallmind.console import activity
from smallmind.kernels.codegen import threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_cores(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields function(item) for each item, in their order, on as many threads as there are cores.

    The first one here, as it may compile kernels. Only as many items are made as threads take.
    """
    remaining = iter(items)
    for item in remaining:
        yield function(item)
        break
    waiting: deque[Future[Result]] = deque()
    count = threads.cores()
    with ThreadPoolExecutor(count) as pool:
        for item in remaining:
            activity.tick()
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
