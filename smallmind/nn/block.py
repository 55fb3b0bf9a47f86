"""One transformer block, pre-norm (Radford et al. 2019)."""

import numpy as np

from smallmind.nn.layers import build_attention, build_mlp, build_norm
from smallmind.nn.scope import Scope


class Block:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(self, scope: Scope) -> None:
        self.workspace = scope.workspace
        self.attention_norm = build_norm(scope.inner("attention_norm"))
        self.attention = build_attention(scope.inner("attention"))
        self.mlp_norm = build_norm(scope.inner("mlp_norm"))
        self.mlp = build_mlp(scope.inner("mlp"))

    def forward(self, x: np.ndarray, T: int) -> np.ndarray:
        """x (B T, C) -> y (B T, C)."""
        x = self.attention.forward(self.attention_norm.forward(x), x, T)
        return self.mlp.forward(self.mlp_norm.forward(x), x)

    def recompute(self, x: np.ndarray, T: int) -> None:
        """x (B T, C), as in forward; keeps what forward keeps, but does not compute y."""
        x = self.attention.forward(self.attention_norm.forward(x), x, T)
        self.mlp.recompute(self.mlp_norm.forward(x))

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
