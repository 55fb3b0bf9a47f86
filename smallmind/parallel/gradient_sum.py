"""The gradient of a step as the sum of its shards', in the same bits at any number of ranks.

Each rank adds its own shards as far as the tree of all shards joins them. Then every part of the
vector is cut into a piece for each rank. A rank receives its piece from all others, adds these
along the tree, and sends the sum to all. So a rank sends and receives about twice the vector,
however many ranks there are, and the order of the sum is that of the tree.

The parts of the vector that a backward pass finishes first can be on their way while it continues.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from smallmind.kernels.number_types import BFLOAT16
from smallmind.nn.transformer import TransformerModel
from smallmind.parallel.group import ALONE, ORDERLY, Group, Pending
from smallmind.parallel.shards import Node, TreeSum, bounds, left_over, own_shards

Result = TypeVar("Result")

BLOCK = 1 << 20  # elements that are exchanged at a time: what arrives stays in the cache


class GradientSum:
    """Adds up the gradients that a model computes, one shard after the other. See `adding`.

    With `rounds` the gradient of every shard and every sum is rounded to bfloat16, which halves
    what is sent. A single shard stays as it is: nothing is added.
    """

    def __init__(
        self, model: TransformerModel, group: Group, shards: int, rounds: bool = False
    ) -> None:
        self.group = group
        # On the value of rank 0; results of all ranks besides the gradient; what is on its way.
        self.agree, self.collect, self.poll = group.agree, group.together, group.poll
        self.is_divided = group.size > 1
        self._shards = shards
        self.own = own_shards(group.rank, group.size, shards)
        self.early: Sequence[slice] = ()  # parts that `send_next` may send before `total`
        self._model = model
        self._grad = model.flat.grad
        self._rounds = rounds and shards > 1
        self._dtype = np.dtype(BFLOAT16) if self._rounds else self._grad.dtype
        self._tree: TreeSum[np.ndarray] = TreeSum(self._join)  # of all own shards but the last
        # The nodes that each rank has left once it has added its own shards.
        self._left = [left_over(own_shards(r, group.size, shards)) for r in range(group.size)]
        self._unused: list[np.ndarray] = []
        self._buffers: dict[tuple[int, int], np.ndarray] = {}
        self._rounded: np.ndarray | None = None  # the gradient of the last own shard
        self._sent = 0  # parts of this step
        # The vectors left of a part, of which the last gets the total; what this rank waits for.
        self._on_its_way: tuple[list[np.ndarray], list[Pending]] | None = None
        self._sums: list[Pending] = []

    def together(self, compute: Callable[[], Result]) -> list[Result]:
        """Every rank computes its part of a step -> those of all. An error discards the step."""
        try:
            return self.group.together(compute)
        except ORDERLY as error:
            if error is self.group.agreed or not self.is_divided:
                self.discard()
            raise

    def rank_of(self, shard: int) -> str:
        """Returns the name of the rank that computes a shard."""
        ranks = range(self.group.size)
        computing = (r for r in ranks if shard in own_shards(r, self.group.size, self._shards))
        return self.group.names[next(computing)]

    def add(self, shard: int) -> None:
        """Adds the gradient of a shard of this rank, which the model holds, and clears it.

        Leaves that of the last one for `total`.
        """
        if shard == self.own[-1]:
            return
        value = self._copied() if self._rounds else self._grad
        self._tree.push(Node(shard, 1, value))
        node = self._tree.nodes[-1]
        if node.value is self._grad:
            self._tree.nodes[-1] = node._replace(value=self._copied())
        self._model.zero_gradients()

    def send_next(self) -> None:
        """Sends the next of the early parts: the gradient of the last own shard is complete there.

        For as long as it is on its way, the part must not change.
        """
        self._send(self.early[self._sent])

    def send_early(self) -> None:
        """Sends what remains of the early parts, complete or not: the other ranks wait for it."""
        if self.group.size > 1:
            for part in self.early[self._sent :]:
                self._send(part)

    def total(self) -> None:
        """Writes the sum over the shards of all ranks to the model's gradient.

        All of them have sent the early parts.
        """
        if self.group.size == 1 and len(self.own) == 1:
            return  # a single shard, whose gradient the model has
        for part in _others(self.early, self._grad.size):
            self._send(part)
        self._add_arrived()
        for pending in self._sums:
            pending.wait()
        self._sums.clear()
        self._sent = 0
        self._forget_sums()
        if self._rounded is not None:
            self._model.workspace.kernels.copy_vector(self._grad, self._rounded)

    def discard(self) -> None:
        """Ends a step that all ranks have given up. The gradients are anything then."""
        if self.early and self.group.size > 1:  # others may have sent some of it already
            self.total()
        self._forget_sums()

    def _forget_sums(self) -> None:
        self._unused += [node.value for node in self._tree.nodes]
        self._tree.nodes.clear()

    def _join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Adds right to left, in place; right is not needed any more."""
        self._model.workspace.kernels.add_vectors(left, left, right)
        if right is not self._grad:
            self._unused.append(right)
        return left

    def _copied(self) -> np.ndarray:
        """Returns the model's gradient, in a vector of its own."""
        vector = self._unused.pop() if self._unused else self._rent(self._grad.size)
        self._model.workspace.kernels.copy_vector(vector, self._grad)
        return vector

    def _send(self, part: slice) -> None:
        """Adds the own shards in a part of the vector, and exchanges it with the other ranks."""
        vectors = [node.value for node in self._own_sum(part)]
        if self.group.size == 1:
            return
        # The vectors that this rank has left of the part are sent, a piece to each rank.
        ends = bounds(vectors[0].size, self.group.size)
        length, arriving = ends[self.group.rank + 1] - ends[self.group.rank], []
        for i in range(max(map(len, self._left))):
            senders = [len(left) > i for left in self._left]
            size = length * (sum(senders) - (i < len(vectors)))
            buffer = self._buffer(self._sent % 2, i, size)
            vector = vectors[i] if i < len(vectors) else None
            arriving.append(self.group.spread(vector, ends, senders, buffer))
        self._sent += 1
        # While one part is added up, the next one is on its way.
        self._add_arrived()
        self._on_its_way = vectors, arriving

    def _own_sum(self, part: slice) -> list[Node[np.ndarray]]:
        """-> a part of what remains of the own shards. All of the last one is in the last node."""
        kernels, last = self._model.workspace.kernels, self._grad[part]
        if self._rounds:
            if self._rounded is None:
                self._rounded = self._rent(self._grad.size)
            kernels.copy_vector(self._rounded[part], last)
            last = self._rounded[part]

        def join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            kernels.add_vectors(right, left, right)
            return right

        tree: TreeSum[np.ndarray] = TreeSum(join)
        for node in self._tree.nodes:
            tree.push(node._replace(value=node.value[part]))
        tree.push(Node(self.own[-1], 1, last))
        if self.group.size == 1:
            tree.total()
        return tree.nodes

    def _add_arrived(self) -> None:
        """Adds up the part that is on its way, and sends the sum of this rank's piece."""
        if not self._on_its_way:
            return
        vectors, arriving = self._on_its_way
        self._on_its_way = None
        arrived = [pending.wait() for pending in arriving]
        ends = bounds(vectors[0].size, self.group.size)
        own = [vector[self.group.own(ends)] for vector in vectors]
        add = self._model.workspace.kernels.add_vectors

        def join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            add(left, left, right)
            return left

        tree: TreeSum[np.ndarray] = TreeSum(join)  # of all ranks' pieces, some of which change
        for rank, left in enumerate(self._left):
            for i, node in enumerate(left):
                piece = own[i] if rank == self.group.rank else arrived[i][rank]
                assert piece is not None
                tree.push(Node(node.first, node.size, piece))
        if (total := tree.total()) is not own[-1]:
            own[-1][...] = total
        self._sums.append(self.group.collect(vectors[-1], ends))

    def _buffer(self, turn: int, i: int, size: int) -> np.ndarray:
        """Returns an array for what arrives, reused for every other part."""
        buffer = self._buffers.get((turn, i))
        if buffer is None or buffer.size < size:
            buffer = self._buffers[turn, i] = self._rent(size)
        return buffer[:size]

    def _rent(self, size: int) -> np.ndarray:
        """Returns an array that stays with this sum, contents undefined."""
        return self._model.workspace.pool.rent(size, self._dtype, self)


def _others(parts: Sequence[slice], size: int) -> Iterator[slice]:
    """Yields the rest of a vector beside `parts`, in parts of at most BLOCK elements."""
    end = 0
    for part in [*sorted(parts, key=lambda part: part.start), slice(size, size)]:
        for start in range(end, part.start, BLOCK):
            yield slice(start, min(start + BLOCK, part.start))
        end = part.stop


@contextmanager
def adding(
    model: TransformerModel, shards: int, rounds: bool = False, group: Group = ALONE
) -> Iterator[GradientSum]:
    """Adds up gradients within the block, in vectors that are rented from the model's pool."""
    gradient_sum = GradientSum(model, group, shards, rounds)
    try:
        yield gradient_sum
    finally:
        model.workspace.pool.return_all(gradient_sum)
