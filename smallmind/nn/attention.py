"""Causal multi-head self-attention (Vaswani et al. 2017)."""

import numpy as np

from smallmind.nn.linear import Linear
from smallmind.nn.parameters import Parameters
from smallmind.nn.projection import Projection
from smallmind.nn.workspace import Workspace


class Attention:
    """Queries, keys and values by one product; attention head by head; a projection back."""

    def __init__(
        self, workspace: Workspace, parameters: Parameters, name: str, n_head: int, site: int
    ) -> None:
        self.workspace = workspace
        self.n_head = n_head
        self.site = site
        self.qkv = Linear(workspace, parameters, f"{name}.qkv")
        self.projection = Projection(workspace, parameters, f"{name}.projection", site + 1)

    def forward(self, x: np.ndarray, residual: np.ndarray, T: int) -> np.ndarray:
        """x, residual (B T, C) -> residual + attention(x); keeps heads and logsumexp."""
        R, C = x.shape
        qkv = self.qkv.forward(x)
        self.heads = self.workspace.rent(R, C)
        self.logsumexp = self.workspace.rent(R // T, self.n_head, T)
        self.workspace.kernels.attention(self.heads, self.logsumexp, qkv, *self._dropout())
        return self.projection.forward(self.heads, residual)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C)."""
        dheads = self.projection.backward(dy)
        qkv = self.qkv.y
        dqkv = self.workspace.rent(*qkv.shape)
        # forward: heads = dropout(softmax(q k^T / sqrt(D))) v
        self.workspace.kernels.attention_backward(
            dqkv, dheads, self.heads, self.logsumexp, qkv, *self._dropout()
        )
        self.workspace.release(dheads, self.heads, self.logsumexp)
        dx = self.qkv.backward(dqkv)
        self.workspace.release(dqkv)
        return dx

    def _dropout(self) -> tuple[int, float]:
        return self.workspace.dropout_key(self.site), self.workspace.drop_probability
