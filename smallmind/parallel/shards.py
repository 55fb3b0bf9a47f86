"""Divides batches into shards, and fixes the order in which shards are added.

The gradient of a step is the sum over the shards of its batches. Floating-point sums depend on
their order, so shards are added pair by pair, in a binary tree that depends on their number alone:
((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Whichever rank computes which shard, the sum has the same
bits, and a rank that computes several keeps only a few vectors.
"""

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from smallmind.checks import InputError
from smallmind.settings.config import TrainingConfig
from smallmind.text.dataset import Batch
from smallmind.text.samplers import Sampler

Value = TypeVar("Value")

DEFAULT_SHARDS = 8  # of a run that begins under mpiexec, on any number of ranks


def bounds(count: int, parts: int) -> list[int]:
    """-> where each of the nearly equal parts of `count` things begins, and the end."""
    return [count * i // parts for i in range(parts + 1)]


def check_processes(size: int, config: TrainingConfig, one_process: str = "") -> None:
    """Raises InputError if a run cannot have so many ranks; `one_process` is why its loss cannot.

    It needs a shard for each of them.
    """
    if size > config.shards:
        raise InputError(
            f"data_shards={config.shards} is too few for {size} ranks: start at most "
            f"{config.shards}, or a new run with --data-shards {size}"
        )
    if size > 1 and one_process:
        raise InputError(one_process)
    if size > 1 and config.products == "blas":
        raise InputError(
            "products='blas' is for one process: with several, the bits of the results must "
            "not depend on the machine; use products='numba'"
        )


def own_shards(rank: int, size: int, shards: int) -> range:
    """Returns the shards that a rank computes; some ranks may have one more than the others."""
    ends = bounds(shards, size)
    return range(ends[rank], ends[rank + 1])


class ShardSampler(Sampler):
    """The windows of consecutive shards, of those that another sampler chooses."""

    def __init__(self, sampler: Sampler, shards: int, own: range) -> None:
        super().__init__(sampler.dataset, sampler.batches)
        self.whole = sampler
        self.shards = shards
        self.own = own

    @property
    def max_batch_size(self) -> int:
        return math.ceil(self.whole.max_batch_size * len(self.own) / self.shards)

    def starts(self, number: int) -> np.ndarray:
        ends = self._ends(number)
        return self.whole.starts(number)[ends[self.own.start] : ends[self.own.stop]]

    def windows_in_batch(self, number: int) -> int:
        return self.whole.windows_in_batch(number)

    def shard(self, number: int, batch: Batch, shard: int) -> Batch:
        """Returns the windows of one shard of batch `number`, as drawn by this sampler."""
        ends = self._ends(number)
        first = ends[self.own.start]
        part = slice(ends[shard] - first, ends[shard + 1] - first)
        return batch.part(part)._replace(first_window=ends[shard])

    def windows_of(self, number: int, shard: int) -> int:
        """Returns the number of windows that a shard has of batch `number`."""
        ends = self._ends(number)
        return ends[shard + 1] - ends[shard]

    def _ends(self, number: int) -> list[int]:
        """Returns the places in batch `number` where each shard begins, and the end."""
        return bounds(self.windows_in_batch(number), self.shards)


class Node(NamedTuple, Generic[Value]):
    """The sum over the shards first..first + size."""

    first: int
    size: int
    value: Value


class TreeSum(Generic[Value]):
    """The sum over shards that are pushed in order, each added by `add(left, right)`.

    Pushing the nodes of another sum gives the same tree as pushing its shards.
    """

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self._add = add
        self.nodes: list[Node[Value]] = []  # from left to right, none of which can be added yet

    def push(self, node: Node[Value]) -> None:
        """Adds the next shards, or the node of their sum."""
        while self.nodes:
            left = self.nodes[-1]
            if left.size != node.size or left.first % (2 * left.size):
                break  # they are not the two halves of a larger one
            self.nodes.pop()
            node = Node(left.first, 2 * left.size, self._add(left.value, node.value))
        self.nodes.append(node)

    def total(self) -> Value:
        """Adds what is left, from the right -> the sum of all that was pushed."""
        value = self.nodes.pop().value
        while self.nodes:
            value = self._add(self.nodes.pop().value, value)
        return value


def left_over(own: range) -> list[Node[None]]:
    """-> the nodes that remain of consecutive shards once they have been added, without values."""
    tree: TreeSum[None] = TreeSum(lambda _left, _right: None)
    for shard in own:
        tree.push(Node(shard, 1, None))
    return tree.nodes
