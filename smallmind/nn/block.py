"""One transformer block, pre-norm (Radford et al. 2019)."""

import numpy as np

from smallmind.nn.attention import Attention
from smallmind.nn.layernorm import LayerNorm
from smallmind.nn.mlp import MLP
from smallmind.nn.parameters import Parameters
from smallmind.nn.workspace import Workspace

DROPOUT_SITES = 3  # attention probabilities, and both projections


class Block:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(
        self, workspace: Workspace, parameters: Parameters, name: str, n_head: int, site: int
    ) -> None:
        self.workspace = workspace
        self.attention_norm = LayerNorm(workspace, parameters, f"{name}.attention_norm")
        self.attention = Attention(workspace, parameters, f"{name}.attention", n_head, site)
        self.mlp_norm = LayerNorm(workspace, parameters, f"{name}.mlp_norm")
        self.mlp = MLP(workspace, parameters, f"{name}.mlp", site + 2)

    def forward(self, x: np.ndarray, T: int) -> np.ndarray:
        """x (B T, C) -> y (B T, C)."""
        x = self.attention.forward(self.attention_norm.forward(x), x, T)
        return self.mlp.forward(self.mlp_norm.forward(x), x)

    def recompute(self, x: np.ndarray, T: int) -> None:
        """x (B T, C), as in forward; keeps what forward keeps, without going on to y."""
        x = self.attention.forward(self.attention_norm.forward(x), x, T)
        self.mlp.recompute(self.mlp_norm.forward(x))

    def backward(self, dx: np.ndarray) -> None:
        """dx (B T, C), the gradient of y -> the gradient of x, in its place."""
        # forward: y = x + mlp(norm(x))
        dnormed = self.mlp.backward(dx)
        self.mlp_norm.backward(dnormed, dx, plus=dx)
        self.workspace.release(dnormed)
        # forward: x = x + attention(norm(x))
        dnormed = self.attention.backward(dx)
        self.attention_norm.backward(dnormed, dx, plus=dx)
        self.workspace.release(dnormed)
