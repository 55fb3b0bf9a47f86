"""What a model rents at most: by the bytes of the arrays, not by whole buckets of the pool."""

from smallmind.memory.tensor_pool import TensorPool


def rented_at_the_peak(monkeypatch, model, action):
    """Bytes that action(model) has rented at one time; all of them must be returned."""
    pool = model.workspace.pool
    held = most = 0

    def rent(n, dtype):
        nonlocal held, most
        array = TensorPool.rent(pool, n, dtype)
        held += array.nbytes
        most = max(most, held)
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
    return most
