"""Causal multi-head self-attention (Vaswani et al. 2017)."""

import numpy as np

from smallmind.nn.dropout import Dropout
from smallmind.nn.linear import Linear
from smallmind.nn.projection import Projection
from smallmind.nn.scope import Scope


class Attention:
    """One product for queries, keys and values; attention head by head; an output projection."""

    def __init__(self, scope: Scope) -> None:
        C = scope.config.n_embd
        self.workspace = scope.workspace
        self.name = scope.name
        self.n_head = scope.config.n_head
        self.dropout = Dropout(scope)
        self.qkv_linear = Linear(scope.inner("qkv"), (C, 3 * C), parts=(C, C, C))
        self.projection = Projection(scope.inner("projection"), C)

    def forward(self, x: np.ndarray, residual: np.ndarray, T: int) -> np.ndarray:
        """x, residual (B T, C) -> residual + attention(x); keeps x, qkv, heads and logsumexp."""
        R, C = x.shape
        self.x = x
        self.qkv = self.qkv_linear.forward(x)
        self.heads = self.workspace.rent(R, C)
        self.logsumexp = self.workspace.rent_full_precision(R // T, self.n_head, T)
        kernels = self.workspace.kernels_for(self.name)
        kernels.attention(self.heads, self.logsumexp, self.qkv, *self.dropout.mask())
        return self.projection.forward(self.heads, residual)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C)."""
        # forward: y = projection(heads)
        dheads = self.projection.backward_input(dy)
        self.projection.backward_weight(self.heads)
        # forward: heads = dropout(softmax(q k^T / sqrt(D))) v
        dqkv = self.workspace.rent(*self.qkv.shape)
        self.workspace.kernels_for(self.name).attention_backward(
            dqkv, dheads, self.heads, self.logsumexp, self.qkv, *self.dropout.mask()
        )
        self.workspace.release(dheads, self.heads, self.logsumexp, self.qkv)
        # forward: qkv = x weight + bias
        self.qkv_linear.backward_weight(self.x, dqkv)
        dx = self.qkv_linear.backward_input(dqkv)
        self.workspace.release(dqkv)
        return dx
