"""The sum of shards' gradients on one rank: that of the plain tree, to the bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import TransformerModel
from smallmind.kernels.alignment import ALIGNMENT
from smallmind.kernels.half import BFLOAT16, round_to, to_float32
from smallmind.parallel.gradient_sum import adding
from tests.parallel.in_process import on_ranks

NO_ROUNDING = np.float32


def plain_sum(gradients, dtype):
    """((0 + 1) + (2 + 3)) + ..., halves of a power of two; every term and sum rounded."""

    def add(first, size):
        if first >= len(gradients):
            return None
        if size == 1:
            return to_float32(round_to(gradients[first], dtype))
        left, right = add(first, size // 2), add(first + size // 2, size // 2)
        return left if right is None else to_float32(round_to(left + right, dtype))

    size = 1
    while size < len(gradients):
        size *= 2
    return add(0, size)


@pytest.fixture(scope="module", params=["numba", "numpy"])
def model(request):
    return TransformerModel(11, 8, 8, 2, 1, backend=request.param)


def gradients_of(model, shards, seed=0):
    random, size = np.random.default_rng(seed), model.flat.grad.size
    # Different magnitudes, so that every order of the sum has other bits.
    return [random.standard_normal(size, np.float32) * 3.0 ** (i % 5) for i in range(shards)]


def add_all(model, gradient_sum, gradients):
    for shard, gradient in enumerate(gradients):
        assert not model.flat.grad.any()
        model.flat.grad[...] = gradient
        gradient_sum.add(shard)
    gradient_sum.total()
    result = model.flat.grad.copy()
    model.zero_gradients()
    return result


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("shards", range(1, 10))
def test_the_sum_is_that_of_the_tree(model, shards, rounds):
    gradients = gradients_of(model, shards)
    # A single shard stays as it is.
    dtype = BFLOAT16 if rounds and shards > 1 else NO_ROUNDING
    expected = plain_sum(gradients, dtype)
    with adding(model, shards, rounds) as gradient_sum:
        for _ in range(2):  # in the same vectors
            actual = add_all(model, gradient_sum, gradients)
            np.testing.assert_array_equal(actual, expected)


def test_the_order_matters():
    """Or the other tests would prove nothing."""
    model = TransformerModel(11, 8, 8, 2, 1, backend="numpy")
    gradients = gradients_of(model, 8)
    one_by_one = sum(gradients[1:], gradients[0])
    assert (plain_sum(gradients, NO_ROUNDING) != one_by_one).any()


@given(shards=st.integers(1, 9), discarded=st.integers(0, 8), rounds=st.booleans())
def test_shards_that_are_discarded_leave_nothing_behind(shards, discarded, rounds):
    model = TransformerModel(11, 8, 8, 2, 1, backend="numpy")
    gradients = gradients_of(model, shards)
    with adding(model, shards, rounds) as gradient_sum:
        expected = add_all(model, gradient_sum, gradients)
        for shard in range(min(discarded, shards)):
            model.flat.grad[...] = 7
            gradient_sum.add(shard)
        gradient_sum.discard()
        model.zero_gradients()
        held = model.workspace.pool.statistics().bytes_held
        np.testing.assert_array_equal(add_all(model, gradient_sum, gradients), expected)
        assert model.workspace.pool.statistics().bytes_held == held


@given(
    shards_size=st.integers(2, 20).flatmap(
        lambda shards: st.tuples(st.just(shards), st.integers(2, shards))
    ),
    early=st.lists(st.integers(0, 2048), max_size=4, unique=True),
    sent=st.integers(0, 2),
    rounds=st.booleans(),
)
@settings(max_examples=50)
def test_ranks_add_up_the_tree_of_all_shards(shards_size, early, sent, rounds):
    """Whatever each of them has of it, and whatever is sent before the end."""
    shards, size = shards_size
    models = [TransformerModel(11, 8, 8, 2, 1, backend="numpy") for _ in range(size)]
    gradients = gradients_of(models[0], shards)
    ends = sorted(early)
    parts = [slice(*pair) for pair in zip(ends[::2], ends[1::2], strict=False)]
    sums = [None] * size

    def add(ranks):
        model = models[ranks.rank]
        with adding(model, shards, rounds, ranks) as gradient_sum:
            gradient_sum.early = parts[::-1]
            for _ in range(2):  # in the same vectors
                for shard in gradient_sum.own:
                    model.flat.grad[...] = gradients[shard]
                    if shard == gradient_sum.own[-1]:
                        for _ in parts[:sent]:
                            gradient_sum.send_next()
                    gradient_sum.add(shard)
                gradient_sum.send_early()
                gradient_sum.total()
                sums[ranks.rank] = model.flat.grad.copy()
                model.zero_gradients()

    on_ranks(size, add, add)
    expected = plain_sum(gradients, BFLOAT16 if rounds else NO_ROUNDING)
    for found in sums:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("shards", [2, 8, 64])
def test_few_vectors_are_held_however_many_shards_there_are(shards, rounds):
    model = TransformerModel(11, 8, 8, 2, 1, backend="numpy")
    before = model.workspace.pool.statistics().bytes_held
    with adding(model, shards, rounds) as gradient_sum:
        add_all(model, gradient_sum, gradients_of(model, shards))
    held = model.workspace.pool.statistics().bytes_held - before
    vector = model.flat.grad.nbytes // (2 if rounds else 1) + ALIGNMENT
    assert held <= (1 + np.log2(shards)) * vector
