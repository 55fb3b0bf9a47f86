"""An embedding of the last two tokens, which leaves less for the blocks to learn."""

import numpy as np

from smallmind.nn.parameters import ZEROS, Role
from smallmind.nn.scope import Scope

FACTOR = 0x9E3779B1  # odd: it spreads pairs over the rows of a table too small for all of them


class BigramEmbedding:
    """A row per pair of tokens, at most `bigram_rows`: then pairs share rows by a hash.

    The first token of a window counts as following token 0.
    """

    def __init__(self, scope: Scope) -> None:
        config = scope.config
        V = config.vocab_size
        self.workspace = scope.workspace
        self.name = "bigram_embedding"
        self.vocab_size, self.rows = V, min(config.bigram_rows, V * V)
        shape = self.rows, config.n_embd
        self.weight = scope.parameters.declare(
            "bigram_embedding.weight", shape, ZEROS, Role.EMBEDDING
        )

    def forward(self, x: np.ndarray, ids: np.ndarray) -> None:
        """x (B T, C), ids (B, T) -> x + the row of each pair. Writes x; keeps the rows' numbers."""
        self.pairs = self._pairs(ids)
        self.workspace.kernels_for(self.name).lookup(x, self.weight.compute, self.pairs, x)

    def backward(self, dx: np.ndarray) -> None:
        """dx (B T, C), which is also the gradient of x -> adds to the gradient of weight."""
        # forward: x = x + weight[pairs]
        self.workspace.kernels_for(self.name).lookup_backward(self.weight.grad, dx, self.pairs)

    def _pairs(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> the row of each token and the one before it (B, T)."""
        pairs = ids.astype(np.int64)
        pairs[:, 1:] += self.vocab_size * ids[:, :-1].astype(np.int64)
        if self.rows < self.vocab_size**2:
            pairs = (pairs * FACTOR % 2**32) * self.rows >> 32
        return pairs.astype(np.int32)
