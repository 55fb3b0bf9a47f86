"""One transformer block, pre-norm (Radford et al. 2019)."""

import numpy as np

from smallmind.nn.attention import Attention
from smallmind.nn.documents import Documents
from smallmind.nn.layers import build_mlp, build_norm
from smallmind.nn.residuals import EmbeddingResidual, Source
from smallmind.nn.scope import Scope


class Block:
    """[x = a x + b embedding;] x = x + attention(norm(x)); x = x + mlp(norm(x)).

    Attention stays inside `documents`. `embedding` and `first_values` are what it mixes in from the
    start of the network, if anything.
    """

    def __init__(
        self,
        scope: Scope,
        documents: Documents,
        embedding: Source | None,
        first_values: Source | None,
        layer: int,
    ) -> None:
        self.workspace = scope.workspace
        self.residual = (
            EmbeddingResidual(scope.inner("embedding_residual"), embedding) if embedding else None
        )
        self.attention_norm = build_norm(scope.inner("attention_norm"))
        self.attention = Attention(scope.inner("attention"), documents, first_values, layer)
        self.mlp_norm = build_norm(scope.inner("mlp_norm"))
        self.mlp = build_mlp(scope.inner("mlp"))

    def forward(self, x: np.ndarray, T: int) -> np.ndarray:
        """x (B T, C) -> y (B T, C)."""
        x = self._attend(x, T)
        return self.mlp.forward(self.mlp_norm.forward(x), x)

    def recompute(self, x: np.ndarray, T: int) -> None:
        """x (B T, C), as in forward; keeps what forward keeps, but does not compute y."""
        self.mlp.recompute(self.mlp_norm.forward(self._attend(x, T)))

    def _attend(self, x: np.ndarray, T: int) -> np.ndarray:
        """x (B T, C) -> what the MLP adds to."""
        if self.residual:
            x = self.residual.forward(x)
        return self.attention.forward(self.attention_norm.forward(x), x, T)

    def backward(self, dx: np.ndarray) -> None:
        """dx (B T, C), the gradient of y -> the gradient of x, in place."""
        # forward: y = x + mlp(norm(x))
        dnormed = self.mlp.backward(dx)
        self.mlp_norm.backward(dnormed, dx, residual=dx)
        self.workspace.release(dnormed)
        # forward: x = x + attention(norm(x))
        dnormed = self.attention.backward(dx)
        self.attention_norm.backward(dnormed, dx, residual=dx)
        self.workspace.release(dnormed)
        # forward: x = a x + b embedding
        if self.residual:
            self.residual.backward(dx)
