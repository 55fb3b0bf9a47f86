"""Tokens and their positions -> the residual stream, with dropout (Radford et al. 2019)."""

import numpy as np

from smallmind.nn.bigram import BigramEmbedding
from smallmind.nn.dropout import Dropout
from smallmind.nn.layer import Layer, Scope
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.nn.parameters import Normal, Parameter, Role


class Embedding(Layer):
    """A matrix with a row per token (V, C) and, if the model has one, a table of pairs."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        config = scope.config
        self.channels = config.n_embd
        self.token = self.declare(scope, "token_embedding.weight", config.vocab_size)
        self.declare_position(scope)
        self.dropout = Dropout(scope)
        self.bigram = BigramEmbedding(scope) if config.bigram_rows else None

    def declare(self, scope: Scope, name: str, rows: int) -> Parameter:
        """A matrix (rows, C)."""
        shape, normal = (rows, self.channels), Normal(INITIAL_DEVIATION)
        return scope.parameters.declare(name, shape, normal, Role.EMBEDDING)

    def declare_position(self, scope: Scope) -> None:
        """Declares what positions need: nothing."""

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> x (B T, C); keeps ids."""
        self.ids = ids
        drops = self.dropout.on
        rent = self.workspace.rent_full_precision if drops else self.workspace.rent
        x = rent(ids.size, self.channels)
        self.look_up(x, ids)
        if self.bigram:
            x = self.bigram.forward(ids, addend=x)
        if not drops:
            return x
        dropped = self.workspace.rent(*x.shape)
        self.dropout.drop(dropped, x)
        self.workspace.release(x)
        return dropped

    def look_up(self, x: np.ndarray, ids: np.ndarray) -> None:
        """ids (B, T) -> x (B T, C), without pairs and dropout. Writes x."""
        self.kernels.embedding(x, self.token.compute, ids)

    def backward(self, dy: np.ndarray) -> None:
        """dy (B T, C) -> adds to gradients. Overwrites dy, and returns nothing: ids have none."""
        # forward: x = dropout(token[ids] + bigram[pairs])
        if self.dropout.on:
            self.dropout.drop(dy, dy)
        if self.bigram:
            self.bigram.backward(dy)
        self.look_up_backward(dy)

    def look_up_backward(self, dx: np.ndarray) -> None:
        """dx (B T, C), the gradient of what look_up wrote -> adds to gradients."""
        # forward: x = token[ids]
        self.kernels.embedding_backward(self.token.grad, None, dx, self.ids)


class PositionEmbedding(Embedding):
    """Also a matrix with a row per position (block_size, C), which is added."""

    def declare_position(self, scope: Scope) -> None:
        """Declares the matrix."""
        rows = scope.config.block_size
        self.position = self.declare(scope, "position_embedding.weight", rows)

    def look_up(self, x: np.ndarray, ids: np.ndarray) -> None:
        """ids (B, T) -> x (B T, C), without pairs and dropout. Writes x."""
        positions = self.position.compute, self.workspace.start
        self.kernels.embedding(x, self.token.compute, ids, *positions)

    def look_up_backward(self, dx: np.ndarray) -> None:
        """dx (B T, C), the gradient of what look_up wrote -> adds to gradients."""
        # forward: x = token[ids] + position
        position = self.position.grad[: self.ids.shape[1]]
        self.kernels.embedding_backward(self.token.grad, position, dx, self.ids)
