"""Causal multi-head self-attention (Vaswani et al. 2017)."""

import numpy as np

from smallmind.nn.documents import Documents
from smallmind.nn.dropout import Dropout
from smallmind.nn.linear import Linear
from smallmind.nn.projection import Projection
from smallmind.nn.residuals import Source, ValueResidual
from smallmind.nn.rmsnorm import HeadNorm
from smallmind.nn.rope import RotaryEmbedding
from smallmind.nn.scope import Scope


class Attention:
    """One product for queries, keys and values; attention head by head; an output projection.

    H heads of queries, and G of keys and of values (Ainslie et al. 2023), of D channels each. A
    query sees only keys of its own document. `first_values` are those of the first block, if the
    model mixes them into all others.
    """

    def __init__(
        self,
        scope: Scope,
        documents: Documents,
        first_values: Source | None,
        layer: int,
    ) -> None:
        config = scope.config
        D, H, G = config.head_channels, config.n_head, config.kv_heads
        self.workspace = scope.workspace
        self.name = scope.name
        self.n_head, self.width = H, H * D
        self.layer = layer
        self.documents = documents
        self.dropout = Dropout(scope)
        widths = H * D, G * D, G * D
        self.qkv_linear = Linear(scope.inner("qkv"), (config.n_embd, sum(widths)), widths=widths)
        self.values = (
            ValueResidual(scope.inner("value_residual"), first_values, (H + G) * D, layer == 0)
            if first_values
            else None
        )
        self.rotary = RotaryEmbedding(scope, H + G) if config.position == "rope" else None
        self.norm = HeadNorm(scope, H, G, self.rotary) if config.qk_norm else None
        self.projection = Projection(scope.inner("projection"), H * D)

    def forward(self, x: np.ndarray, residual: np.ndarray, T: int) -> np.ndarray:
        """x, residual (B T, C) -> residual + attention(x); keeps x, qkv, heads and logsumexp."""
        R = len(x)
        self.x, self.T = x, T
        self.qkv = self.qkv_linear.forward(x)
        if self.values:
            self.values.forward(self.qkv)
        if self.norm:
            self.norm.forward(self.qkv, T)
        elif self.rotary:
            self.rotary.forward(self.qkv, T)
        self.heads = self.workspace.rent(R, self.width)
        kernels, cache = self.workspace.kernels_for(self.name), self.workspace.cache
        if cache:
            cache.keep(kernels, self.layer, self.qkv)
        if cache and cache.start:
            cache.attend(kernels, self.layer, self.heads, self.qkv, self.documents.firsts)
        else:
            self.logsumexp = self.workspace.rent_full_precision(R // T, self.n_head, T)
            kernels.attention(
                self.heads, self.logsumexp, self.qkv, *self.dropout.mask(), self.documents.firsts
            )
        return self.projection.forward(self.heads, residual)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C)."""
        # forward: y = projection(heads)
        dheads = self.projection.backward_input(dy)
        self.projection.backward_weight(self.heads)
        # forward: heads = dropout(softmax(q k^T / sqrt(D))) v
        dqkv = self.workspace.rent(*self.qkv.shape)
        given = dheads, self.heads, self.logsumexp, self.qkv
        self.workspace.kernels_for(self.name).attention_backward(
            dqkv, *given, *self.dropout.mask(), self.documents.firsts
        )
        self.workspace.release(dheads, self.heads, self.logsumexp, self.qkv)
        # forward: q, k = rotary(norm(q)), rotary(norm(k)); v = mixture(v)
        if self.norm:
            self.norm.backward(dqkv, self.T)
        elif self.rotary:
            self.rotary.backward(dqkv, self.T)
        if self.values:
            self.values.backward(dqkv)
        # forward: qkv = x weight + bias
        self.qkv_linear.backward_weight(self.x, dqkv)
        dx = self.qkv_linear.backward_input(dqkv)
        self.workspace.release(dqkv)
        return dx
