"""An embedding of the last two tokens, which leaves less for the blocks to learn."""

import numpy as np

from smallmind.nn.documents import BATCH_FIRSTS
from smallmind.nn.layer import Layer, Scope
from smallmind.nn.parameters import ZEROS, Role


class BigramEmbedding(Layer, only_kernels=True):
    """y[t] = addend[t] + weight[pair(ids[t - 1], ids[t])].

    A row per pair of tokens, at most `bigram_rows`: then pairs share rows by a hash.
    The first token of a window or a document counts as following token 0. Where the vocabulary has
    grown, pairs keep their numbers: tokens from `bigram_vocab` on count as token 0.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        config = scope.config
        V = config.bigram_vocab or config.vocab_size
        self.name = "bigram_embedding"
        self.vocab_size, self.count = V, min(config.bigram_rows, V * V)
        self.document_token = -1 if config.document_token is None else config.document_token
        shape = self.count, config.n_embd
        scope = scope._replace(name="bigram_embedding")
        self.weight = scope.declare("weight", shape, ZEROS, Role.EMBEDDING, quantises=False)

    def forward(self, ids: np.ndarray, addend: np.ndarray) -> np.ndarray:
        """ids (B, T) -> addend (B T, C) + the row of each pair, in place; keeps their numbers."""
        self.rows = self.workspace.rent_ids(*ids.shape)
        kernels, cache = self.kernels, self.workspace.cache
        before = cache.previous if cache else None
        table = self.vocab_size, self.count, self.document_token
        firsts = self.workspace.carried.get(BATCH_FIRSTS)
        kernels.bigrams(self.rows, ids, *table, before, firsts)
        kernels.embedding(addend, self.weight.compute, self.rows, addend)
        return addend

    def backward(self, dy: np.ndarray) -> None:
        """dy (B T, C), which is the gradient of addend too -> adds to the gradient of weight."""
        # forward: y = addend + weight[rows]
        self.kernels.embedding_backward(self.weight.grad, None, dy, self.rows)
        self.workspace.release(self.rows)
