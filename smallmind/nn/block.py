"""One transformer block, pre-norm (Radford et al. 2019)."""

import numpy as np

from smallmind.nn.documents import Documents
from smallmind.nn.layer import Branch, Layer, Norm, Scope
from smallmind.nn.layers import build
from smallmind.nn.position import Position
from smallmind.nn.residuals import Carried, EmbeddingResidual


class Block(Layer, only_kernels=True, page="prenorm"):
    """[x = a x + b embedding;] x = x + attention(norm(x)); x = x + mlp(norm(x)).

    Attention stays inside `documents`. `embedding` and `first_values` are what it mixes in from the
    start of the network, if anything.
    """

    def __init__(
        self,
        scope: Scope,
        position: Position,
        documents: Documents,
        embedding: Carried | None,
        first_values: Carried | None,
        layer: int,
    ) -> None:
        super().__init__(scope)
        self.residual = (
            EmbeddingResidual(scope.inner("embedding_residual"), embedding) if embedding else None
        )
        self.attention_norm: Norm = build("norm", scope.inner("attention_norm"))
        inner = scope.inner("attention").adapted("attention")
        self.attention: Branch = build(
            "attention", inner, position.in_block(layer), documents, first_values, layer
        )
        self.mlp_norm: Norm = build("norm", scope.inner("mlp_norm"))
        self.mlp: Branch = build("mlp", scope.inner("mlp").adapted("mlp"))

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (B T, C) -> y (B T, C)."""
        self._attend(x)
        return self.mlp.forward(self.normed_middle, addend=self.middle)

    def recompute(self, x: np.ndarray) -> None:
        """x (B T, C), as in forward; keeps what forward keeps, but does not compute y."""
        self._attend(x)
        self.mlp.recompute(self.normed_middle)

    def _attend(self, x: np.ndarray) -> None:
        """x (B T, C) -> keeps what the MLP takes and what it adds to."""
        if self.residual:
            x = self.mixture = self.residual.forward(x)
        self.normed = self.attention_norm.forward(x)
        self.middle = self.attention.forward(self.normed, addend=x)
        self.normed_middle = self.mlp_norm.forward(self.middle)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C), in place."""
        release = self.workspace.release
        # forward: y = middle + mlp(norm(middle))
        dnormed = self.mlp.backward(dy)
        dmiddle = self.mlp_norm.backward(dnormed, addend=dy)
        release(dnormed, self.normed_middle, self.middle)
        # forward: middle = x + attention(norm(x))
        dnormed = self.attention.backward(dmiddle)
        dx = self.attention_norm.backward(dnormed, addend=dmiddle)
        release(dnormed, self.normed)
        # forward: x = a x + b embedding
        if self.residual:
            dx = self.residual.backward(dx)
            release(self.mixture)
        return dx
