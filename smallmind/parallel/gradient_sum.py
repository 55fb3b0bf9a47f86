"""The gradient of a step as the sum of its shards', in the same bits at any number of ranks.

Each rank adds its own shards as far as the tree of all shards joins them. Then the vector is cut
into blocks, and each block into a piece for every rank. A rank receives its piece from all others,
adds these along the tree, and sends the sum to all. So a rank sends and receives about twice the
vector, however many ranks there are, and the order of the sum is that of the tree.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from smallmind.kernels.half import BFLOAT16
from smallmind.nn.transformer import TransformerModel
from smallmind.parallel.ranks import Pending, Ranks, bounds
from smallmind.parallel.shards import Node, TreeSum, left_over, own_shards

BLOCK = 1 << 20  # elements on their way at the same time: what arrives stays in the cache


class GradientSum:
    """Adds up the gradients that a model computes, one shard after the other. See `adding`.

    With `rounds` the gradient of every shard and every sum is rounded to bfloat16, which halves
    what is sent. A single shard stays as it is: nothing is added.
    """

    def __init__(
        self, model: TransformerModel, ranks: Ranks, shards: int, rounds: bool = False
    ) -> None:
        self.ranks = ranks
        self.own = own_shards(ranks.rank, ranks.size, shards)
        self._model = model
        self._grad = model.flat.grad
        self._rounds = rounds and shards > 1
        self._dtype = np.dtype(BFLOAT16) if self._rounds else self._grad.dtype
        self._is_last = False
        self._tree: TreeSum[np.ndarray] = TreeSum(self._join)
        # What each rank has left once it has added its own shards.
        self._left = [left_over(own_shards(r, ranks.size, shards)) for r in range(ranks.size)]
        self._unused: list[np.ndarray] = []
        self._rooms: dict[tuple[int, int], np.ndarray] = {}

    def add(self, shard: int) -> None:
        """Adds the gradient of a shard of this rank, which the model holds, and clears it.

        Keeps that of the last one: `total` follows.
        """
        self._is_last = shard == self.own[-1]
        value = self._copied() if self._rounds else self._grad
        self._tree.push(Node(shard, 1, value))
        if self._is_last:
            return
        node = self._tree.nodes[-1]
        if node.value is self._grad:
            self._tree.nodes[-1] = node._replace(value=self._copied())
        self._model.zero_gradients()

    def total(self) -> None:
        """Writes the sum over the shards of all ranks to the model's gradient."""
        total = self._exchanged() if self.ranks.size > 1 else self._tree.total()
        if total is not self._grad:
            self._model.workspace.kernels.copy_vector(self._grad, total)
            self._unused.append(total)

    def discard(self) -> None:
        """Drops the shards that have been added since the last total."""
        self._unused += [node.value for node in self._tree.nodes if node.value is not self._grad]
        self._tree.nodes.clear()

    def _join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """left + right, in one of the two; the other is not needed any more."""
        sum_, unused = left, right
        if right is self._grad and self._is_last:
            sum_, unused = right, left
        self._model.workspace.kernels.add_vectors(sum_, left, right)
        if unused is not self._grad:
            self._unused.append(unused)
        return sum_

    def _copied(self) -> np.ndarray:
        """The model's gradient, in a vector of its own."""
        vector = self._unused.pop() if self._unused else self._rent(self._grad.size)
        self._model.workspace.kernels.copy_vector(vector, self._grad)
        return vector

    def _exchanged(self) -> np.ndarray:
        """The sum over what all ranks have left, in one of the vectors of this one."""
        vectors = [node.value for node in self._tree.nodes]
        self._tree.nodes.clear()
        total, sums = vectors[-1], []
        size = total.size
        blocks = [slice(i, min(i + BLOCK, size)) for i in range(0, size, BLOCK)]
        # While one block is added up, the next one is on its way.
        arriving = self._spread(vectors, blocks[0], 0)
        for i, block in enumerate(blocks):
            arrived = [pending.wait() for pending in arriving]
            if i + 1 < len(blocks):
                arriving = self._spread(vectors, blocks[i + 1], (i + 1) % 2)
            ends = bounds(block.stop - block.start, self.ranks.size)
            own = slice(ends[self.ranks.rank], ends[self.ranks.rank + 1])
            self._add_pieces(total[block][own], [v[block][own] for v in vectors], arrived)
            sums.append(self.ranks.collect(total[block], ends))
        for pending in sums:
            pending.wait()
        self._unused += [v for v in vectors[:-1] if v is not self._grad]
        return total

    def _spread(self, vectors: list[np.ndarray], block: slice, turn: int) -> list[Pending]:
        """Sends a block of what this rank has left, a piece to each rank."""
        ends = bounds(block.stop - block.start, self.ranks.size)
        length = ends[self.ranks.rank + 1] - ends[self.ranks.rank]
        sent = []
        for i in range(max(map(len, self._left))):
            senders = [len(left) > i for left in self._left]
            room = self._room(turn, i, length * (sum(senders) - (i < len(vectors))))
            part = vectors[i][block] if i < len(vectors) else None
            sent.append(self.ranks.spread(part, ends, senders, room))
        return sent

    def _room(self, turn: int, i: int, size: int) -> np.ndarray:
        """An array for what arrives, reused for every other block."""
        room = self._rooms.get((turn, i))
        if room is None or room.size < size:
            room = self._rooms[turn, i] = self._rent(size)
        return room[:size]

    def _rent(self, size: int) -> np.ndarray:
        """An array that stays with this sum, contents undefined."""
        return self._model.workspace.pool.rent(size, self._dtype, self)

    def _add_pieces(
        self,
        out: np.ndarray,
        own: list[np.ndarray],
        arrived: list[list[np.ndarray | None]],
    ) -> None:
        """Writes the sum over all ranks' pieces. Those that it adds change."""
        add = self._model.workspace.kernels.add_vectors

        def join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            add(left, left, right)
            return left

        tree: TreeSum[np.ndarray] = TreeSum(join)
        for rank, left in enumerate(self._left):
            for i, node in enumerate(left):
                piece = own[i] if rank == self.ranks.rank else arrived[i][rank]
                assert piece is not None
                tree.push(Node(node.first, node.size, piece))
        total = tree.total()
        if total is not out:
            out[...] = total


@contextmanager
def adding(
    model: TransformerModel, ranks: Ranks, shards: int, rounds: bool = False
) -> Iterator[GradientSum]:
    """Within the block, adds up gradients, in vectors that are rented from the model's pool."""
    gradient_sum = GradientSum(model, ranks, shards, rounds)
    try:
        yield gradient_sum
    finally:
        model.workspace.pool.return_all(gradient_sum)
