"""Shards of batches: which windows they have, and the tree that adds them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smallmind.parallel.shards import Node, ShardSampler, TreeSum, bounds, left_over, own_shards
from smallmind.settings.config import TrainingConfig
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import draw, make_sampler

shards_and_ranks = st.integers(1, 40).flatmap(
    lambda shards: st.tuples(st.just(shards), st.integers(1, shards))
)


def joined(left, right):
    """A pair that shows where the brackets of a sum are."""
    return left, right


def pushed(nodes):
    tree = TreeSum(joined)
    for node in nodes:
        tree.push(node)
    return tree


def summed(nodes):
    return pushed(nodes).total()


def leaves(own):
    return [Node(shard, 1, shard) for shard in own]


def in_order(tree):
    return [tree] if isinstance(tree, int) else in_order(tree[0]) + in_order(tree[1])


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_parts_cover_everything_and_differ_by_at_most_one(count, parts):
    ends = bounds(count, parts)
    sizes = np.diff(ends)
    assert ends[0] == 0 and ends[-1] == count and len(sizes) == parts
    assert sizes.min() >= 0 and sizes.max() - sizes.min() <= 1


@given(shards_and_ranks)
def test_every_shard_belongs_to_one_rank(shards_ranks):
    shards, ranks = shards_ranks
    own = [own_shards(rank, ranks, shards) for rank in range(ranks)]
    assert [shard for part in own for shard in part] == list(range(shards))
    sizes = [len(part) for part in own]
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1


def test_powers_of_two_make_a_balanced_tree():
    assert summed(leaves(range(8))) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


def test_other_numbers_are_added_from_the_right():
    assert summed(leaves(range(1))) == 0
    assert summed(leaves(range(3))) == ((0, 1), 2)
    assert summed(leaves(range(6))) == (((0, 1), (2, 3)), (4, 5))
    assert summed(leaves(range(7))) == (((0, 1), (2, 3)), ((4, 5), 6))


@given(shards_and_ranks)
def test_the_nodes_of_ranks_make_the_same_tree_as_their_shards(shards_ranks):
    shards, ranks = shards_ranks
    nodes = []
    for rank in range(ranks):
        own = own_shards(rank, ranks, shards)
        tree = pushed(leaves(own))
        nodes += tree.nodes
        expected = [(node.first, node.size) for node in left_over(own)]
        assert [(node.first, node.size) for node in tree.nodes] == expected
    whole = summed(leaves(range(shards)))
    assert summed(nodes) == whole
    assert in_order(whole) == list(range(shards))


@given(shards_and_ranks)
def test_a_rank_has_few_vectors_left(shards_ranks):
    """At most two of each size: one at each end of its shards."""
    shards, ranks = shards_ranks
    for rank in range(ranks):
        sizes = [node.size for node in left_over(own_shards(rank, ranks, shards))]
        assert all(sizes.count(size) <= 2 for size in sizes)


@given(
    shards_ranks=shards_and_ranks,
    tokens=st.integers(60, 400),
    batch_size=st.integers(1, 20),
    batches=st.integers(1, 3),
    epochs=st.integers(0, 1),
    step=st.integers(1, 50),
)
def test_shards_have_the_windows_of_the_whole_batch(
    shards_ranks, tokens, batch_size, batches, epochs, step
):
    shards, ranks = shards_ranks
    data = Dataset(np.arange(tokens, dtype=np.int32), 5, batch_size, 7)
    whole = make_sampler(data, TrainingConfig(epochs=epochs, grad_accum_steps=batches))
    parts = [ShardSampler(whole, shards, own_shards(r, ranks, shards)) for r in range(ranks)]
    assert all(part.windows_in_step(step) == whole.windows_in_step(step) for part in parts)
    for number in range((step - 1) * batches, step * batches):
        batch = draw(whole, number)
        assert whole.windows_in_batch(number) == len(batch.ids)
        first, found = 0, []
        for part in parts:
            assert part.windows_in_batch(number) == len(batch.ids)
            own = draw(part, number)
            assert len(own.ids) <= part.max_batch_size
            for shard in part.own:
                found.append(part.shard(number, own, shard))
                assert found[-1].first_window == first or part.shards == 1
                first += len(found[-1].ids)
        assert len(found) == shards
        for i, expected in enumerate(batch[:3]):
            np.testing.assert_array_equal(np.concatenate([one[i] for one in found]), expected)
