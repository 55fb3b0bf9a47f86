"""Peaks of memory: what a model rents, in bytes of arrays, and what Python allocates."""

import tracemalloc
from contextlib import contextmanager

from smallmind.memory.tensor_pool import TensorPool


def rented_at_the_peak(monkeypatch, model, action):
    """The most bytes that action(model) has rented at one time; it must return all of them."""
    pool = model.workspace.pool
    held = peak = 0

    def rent(n, dtype, owner):
        nonlocal held, peak
        array = TensorPool.rent(pool, n, dtype, owner)
        held += array.nbytes
        peak = max(peak, held)
        return array

    def return_(array, clear):
        nonlocal held
        held -= array.nbytes
        TensorPool.return_(pool, array, clear)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "rent", rent)
        patch.setattr(pool, "return_", return_)
        action(model)
    assert held == 0
    return peak


@contextmanager
def traced():
    """Counts what Python allocates in the block, for tracemalloc.get_traced_memory."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
