"""The batches of a run: drawn when they are needed, or by a thread while the steps before compute.

A disk may take longer to answer than usual, for example when its pages are not in memory. Batches
that are drawn ahead hide that, as long as reading takes less time than computing on average.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import Empty, SimpleQueue

import numpy as np

from smallmind.console import activity
from smallmind.memory.tensor_pool import TensorPool
from smallmind.text.dataset import Batch
from smallmind.text.samplers import Sampler, draw


@contextmanager
def borrow_batches(
    pool: TensorPool,
    shape: tuple[int, int],
    ahead: int,
    is_weighted: bool = False,
    is_packed: bool = False,
) -> Iterator[tuple[Batch, ...]]:
    """Lends arrays for the batch in use and those drawn ahead of it, of at most this shape."""
    with ExitStack() as stack:

        def borrow(dtype: type) -> np.ndarray:
            return stack.enter_context(pool.borrow(shape, dtype))

        nowhere = np.empty(0, np.int64)
        yield tuple(
            Batch(
                borrow(np.int32),
                borrow(np.int32),
                nowhere,
                borrow(np.float32) if is_weighted else None,
                firsts=borrow(np.int32) if is_packed else None,
            )
            for _ in range(1 + ahead)
        )


@contextmanager
def drawing(sampler: Sampler, pool: TensorPool, ahead: int, end: int) -> Iterator["Batches"]:
    """Draws the batches of a run before number `end`, `ahead` of them in advance, by a thread.

    The thread has ended when the block has, even by an error or an interrupt: it finishes the batch
    that it is drawing. Nothing else may use the sampler meanwhile.
    """
    data, shape = sampler.dataset, (sampler.max_batch_size, sampler.dataset.block_size)
    with borrow_batches(pool, shape, ahead, data.is_weighted, data.is_packed) as buffers:
        batches = Batches(sampler, buffers, end)
        try:
            yield batches
            batches.close()
        except BaseException:
            batches.close()  # once more, if an interrupt came during the first time
            raise


class Batches:
    """Draws batches into buffers: one is in use, into the others a thread draws what comes next.

    `latest` is the last batch that had windows. See `drawing`.
    """

    def __init__(self, sampler: Sampler, buffers: tuple[Batch, ...], end: int) -> None:
        self.sampler = sampler
        self.latest = buffers[0]
        self._buffers = buffers
        self._end = end
        self._ahead: _Ahead | None = None

    def get(self, number: int) -> Batch:
        """Returns batch `number`, from 0, as `samplers.draw` does, or raises its error.

        Its arrays are valid until another batch with windows is returned. A number that does not
        follow the last one, as after a rollback, discards what has been drawn ahead.
        """
        if len(self._buffers) == 1:
            batch = draw(self.sampler, number, self._buffers[0])
        else:
            if not self._ahead or self._ahead.number != number:
                self.close()
                numbers = range(number, max(self._end, number + 1))
                # Known before it starts: an interrupt must not leave a thread that nobody ends.
                self._ahead = _Ahead(self.sampler, numbers, self._buffers)
                self._ahead.thread.start()
            batch = self._ahead.take()
        if len(batch.ids):
            self.latest = batch
        return batch

    def close(self) -> None:
        """Ends the thread, and discards what it has drawn."""
        if self._ahead:
            self._ahead.end()
            self._ahead = None


class _Ahead:
    """A thread that draws batches with these numbers, in order, as buffers become free.

    `number` is that of the batch that `take` returns next. The thread runs no kernel, because
    Numba's threading layers take kernels from one thread only, and no `activity`, which belongs to
    the main thread.
    """

    def __init__(self, sampler: Sampler, numbers: range, buffers: tuple[Batch, ...]) -> None:
        self.number = numbers.start
        self._sampler = sampler
        self._numbers = numbers
        self._free: SimpleQueue[Batch | None] = SimpleQueue()
        self._drawn: SimpleQueue[tuple[Batch, Batch] | BaseException] = SimpleQueue()
        self._in_use: Batch | None = None
        self._has_ended = False
        for buffer in buffers:
            self._free.put(buffer)
        # A daemon: a read that never returns must not keep the program from ending.
        self.thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def take(self) -> Batch:
        """Returns the next batch, once it is drawn; the error if drawing it failed."""
        drawn: tuple[Batch, Batch] | BaseException | None = None
        while drawn is None:
            try:
                drawn = self._drawn.get(timeout=activity.REFRESH)
            except Empty:
                activity.tick()
        if isinstance(drawn, BaseException):
            self.number = -1  # no batch follows: asking again starts a new thread
            raise drawn
        batch, buffer = drawn
        self.number += 1
        # A batch without windows leaves the one before it in use.
        unused, self._in_use = (self._in_use, buffer) if len(batch.ids) else (buffer, self._in_use)
        if unused is not None:
            self._free.put(unused)
        return batch

    def end(self) -> None:
        """Waits until the thread has ended, after the batch that it is drawing if it is."""
        self._has_ended = True
        self._free.put(None)  # in case it waits for a buffer
        try:
            self._join()
        except BaseException:
            self._join()  # the pool must not lend a buffer that the thread still writes to
            raise

    def _join(self) -> None:
        while self.thread.is_alive():
            self.thread.join(activity.REFRESH)

    def _run(self) -> None:
        try:
            for number in self._numbers:
                buffer = self._free.get()
                if buffer is None or self._has_ended:
                    return
                self._drawn.put((draw(self._sampler, number, buffer), buffer))
        except BaseException as error:
            self._drawn.put(error)
