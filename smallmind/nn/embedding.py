"""Tokens and their positions -> the residual stream, with dropout (Radford et al. 2019)."""

import numpy as np

from smallmind.nn.dropout import Dropout
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.nn.parameters import Normal, Role
from smallmind.nn.scope import Scope


class Embedding:
    """A matrix with a row per token (V, C), and one with a row per position (block_size, C)."""

    def __init__(self, scope: Scope) -> None:
        config, normal = scope.config, Normal(INITIAL_DEVIATION)
        C = config.n_embd
        self.workspace = scope.workspace
        self.name = scope.name
        self.channels = C
        self.token = scope.parameters.declare(
            "token_embedding.weight", (config.vocab_size, C), normal, Role.EMBEDDING
        )
        self.position = scope.parameters.declare(
            "position_embedding.weight", (config.block_size, C), normal, Role.EMBEDDING
        )
        self.dropout = Dropout(scope)

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> x (B T, C); keeps ids."""
        self.ids = ids
        drops = self.dropout.on
        rent = self.workspace.rent_full_precision if drops else self.workspace.rent
        x = rent(ids.size, self.channels)
        kernels = self.workspace.kernels_for(self.name)
        kernels.embedding(x, self.token.compute, self.position.compute, ids)
        if not drops:
            return x
        dropped = self.workspace.rent(*x.shape)
        self.dropout.forward(dropped, x)
        self.workspace.release(x)
        return dropped

    def backward(self, dx: np.ndarray) -> None:
        """dx (B T, C) -> adds to the gradients of both matrices. Overwrites dx."""
        # forward: x = dropout(token[ids] + position)
        if self.dropout.on:
            self.dropout.backward(dx, dx)
        kernels = self.workspace.kernels_for(self.name)
        kernels.embedding_backward(self.token.grad, self.position.grad, dx, self.ids)
