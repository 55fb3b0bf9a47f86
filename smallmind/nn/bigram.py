"""An embedding of the last two tokens, which leaves less for the blocks to learn."""

import numpy as np

from smallmind.nn.parameters import ZEROS, Role
from smallmind.nn.scope import Scope


class BigramEmbedding:
    """A row per pair of tokens, at most `bigram_rows`: then pairs share rows by a hash.

    The first token of a window or a document counts as following token 0.
    """

    def __init__(self, scope: Scope) -> None:
        config = scope.config
        V = config.vocab_size
        self.workspace = scope.workspace
        self.name = "bigram_embedding"
        self.vocab_size, self.count = V, min(config.bigram_rows, V * V)
        self.document_token = -1 if config.document_token is None else config.document_token
        shape = self.count, config.n_embd
        self.weight = scope.parameters.declare(
            "bigram_embedding.weight", shape, ZEROS, Role.EMBEDDING
        )

    def forward(self, x: np.ndarray, ids: np.ndarray) -> None:
        """x (B T, C), ids (B, T) -> x + the row of each pair. Writes x; keeps their numbers."""
        self.rows = self.workspace.rent_ids(*ids.shape)
        kernels, cache = self.workspace.kernels_for(self.name), self.workspace.cache
        before = cache.previous if cache else None
        table = self.vocab_size, self.count, self.document_token
        kernels.bigrams(self.rows, ids, *table, before)
        kernels.embedding(x, self.weight.compute, self.rows, x)

    def backward(self, dx: np.ndarray) -> None:
        """dx (B T, C), which is also the gradient of x -> adds to the gradient of weight."""
        # forward: x = x + weight[rows]
        kernels = self.workspace.kernels_for(self.name)
        kernels.embedding_backward(self.weight.grad, None, dx, self.rows)
        self.workspace.release(self.rows)
