"""Tokens and their positions -> the residual stream, with dropout (Radford et al. 2019)."""

import math

import numpy as np

from smallmind.nn.bigram import BigramEmbedding
from smallmind.nn.dropout import Dropout
from smallmind.nn.layer import Layer, Scope
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.nn.parameters import Normal, Role
from smallmind.nn.position import position_class


class Embedding(Layer, only_kernels=True, page="tokens"):
    """x = dropout(token[ids] + positions + bigram[pairs]), with a row per token (V, C)."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        config = scope.config
        shape, normal = (config.vocab_size, config.n_embd), Normal(INITIAL_DEVIATION)
        token = scope._replace(name="token_embedding")
        self.token = token.declare("weight", shape, normal, Role.EMBEDDING)
        self.position = position_class(config)(scope)
        self.dropout = Dropout(scope)
        self.bigram = BigramEmbedding(scope) if config.bigram_rows else None
        self.channels = config.n_embd
        self.factor, self.scaled = 1.0, f"{self.name}.scaled"

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> x (B T, C); keeps ids."""
        self.ids = ids
        drops = self.dropout.on
        rent = self.workspace.rent_full_precision if drops else self.workspace.rent
        x = rent(ids.size, self.channels)
        self.position.embed(self.kernels, x, ids, self.token)
        if self.factor != 1:
            self.workspace.kernels_for(self.scaled).scale(x, x, self.factor)
        if self.bigram:
            x = self.bigram.forward(ids, addend=x)
        if not drops:
            return x
        dropped = self.workspace.rent(*x.shape)
        self.dropout.drop(dropped, x)
        self.workspace.release(x)
        return dropped

    def backward(self, dy: np.ndarray) -> None:
        """dy (B T, C) -> adds to gradients. Overwrites dy, and returns nothing: ids have none."""
        # forward: x = dropout(token[ids] + positions + bigram[pairs])
        if self.dropout.on:
            self.dropout.drop(dy, dy)
        if self.bigram:
            self.bigram.backward(dy)
        if self.factor != 1:
            # forward: x = factor (token[ids] + positions)
            self.workspace.kernels_for(self.scaled).scale(dy, dy, self.factor)
        self.position.embed_backward(self.kernels, dy, self.ids, self.token)


class ScaledEmbedding(Embedding, only_kernels=True, page="scaled"):
    """x = dropout(sqrt(C) (token[ids] + positions) + bigram[pairs]) (Vaswani et al. 2017)."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.factor = math.sqrt(self.channels)
