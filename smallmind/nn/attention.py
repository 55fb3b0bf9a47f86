"""Causal multi-head self-attention (Vaswani et al. 2017)."""

import numpy as np

from smallmind.nn.documents import Documents
from smallmind.nn.dropout import Dropout
from smallmind.nn.layer import Branch, Scope
from smallmind.nn.layers import build_linear
from smallmind.nn.position import Position
from smallmind.nn.projection import Projection
from smallmind.nn.residuals import Carried, ValueResidual
from smallmind.nn.rmsnorm import HeadNorm


class Attention(Branch, only_kernels=True, page="causal"):
    """y = projection(softmax(scale q k^T) v), head by head, with q, k, v = x weight + bias.

    Causal, see Vaswani et al. (2017), with scale = 1 / sqrt(D) unless `score_divisor` replaces D.
    H heads of queries, and G of keys and of values (Ainslie et al. 2023), of D channels each. A
    query sees only keys of its own document and, in a block with a window (Beltagy et al. 2020), of
    the last tokens. `first_values` are those of the first block, if the model mixes them into all
    others.
    """

    def __init__(
        self,
        scope: Scope,
        position: Position,
        documents: Documents,
        first_values: Carried | None,
        layer: int,
    ) -> None:
        super().__init__(scope)
        config = scope.config
        D, H, G = config.head_channels, config.n_head, config.kv_heads
        self.n_head, self.width = H, H * D
        self.layer, self.window = layer, config.window_of(layer)
        divisor = config.part_setting("score_divisor")
        self.scale = None if divisor is None else divisor**-0.5
        self.documents = documents
        self.dropout = Dropout(scope)
        widths = H * D, G * D, G * D
        shape = config.n_embd, sum(widths)
        bias = config.part_setting("qkv_bias")
        self.qkv_linear = build_linear(scope.inner("qkv"), shape, widths=widths, bias=bias)
        self.value_residual = None
        if first_values:
            inner, first = scope.inner("value_residual"), (H + G) * D
            self.value_residual = ValueResidual(inner, first_values, first, layer == 0)
        self.head_norm, self.rotation = None, position if position.rotates else None
        if config.qk_norm:
            if norm_rotates := len(position.frequencies or ()) == D // 2:  # all channels
                self.rotation = None
            self.head_norm = HeadNorm(scope, H, G, position if norm_rotates else Position(scope))
        self.projection = Projection(scope.inner("projection"), H * D)

    def _firsts(self) -> np.ndarray | None:
        return self.documents.firsts(len(self.qkv) // self.workspace.T, self.window)

    def forward(self, x: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """x (B T, C) -> y (B T, C) [+ addend (B T, C)]; keeps x, qkv, heads and logsumexp."""
        R, T = len(x), self.workspace.T
        self.qkv = self.qkv_linear.forward(x)
        if self.value_residual:
            self.value_residual.forward(self.qkv)
        if self.head_norm:
            self.head_norm.forward(self.qkv)
        cache, firsts = self.workspace.cache, self._firsts()
        kernels = self.kernels
        if self.rotation:
            self.rotation.rotate(kernels, self.qkv)
        self.heads = self.workspace.rent(R, self.width)
        if cache:
            cache.keep(kernels, self.layer, self.qkv)
        if cache and cache.start > 0:
            cache.attend(kernels, self.layer, self.heads, self.qkv, firsts, self.scale)
        else:
            self.logsumexp = self.workspace.rent_full_precision(R // T, self.n_head, T)
            mask = self.dropout.mask()
            kernels.attention(self.heads, self.logsumexp, self.qkv, *mask, firsts, self.scale)
        return self.projection.forward(self.heads, addend)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C); adds to gradients."""
        # forward: y = projection(heads)
        dheads = self.projection.backward(dy)
        # forward: heads = dropout(softmax(scale q k^T)) v
        dqkv, firsts = self.workspace.rent(*self.qkv.shape), self._firsts()
        kernels, mask = self.kernels, self.dropout.mask()
        kernels.attention_backward(
            dqkv, dheads, self.heads, self.logsumexp, self.qkv, *mask, firsts, self.scale
        )
        self.workspace.release(dheads, self.heads, self.logsumexp, self.qkv)
        # forward: v = mixture(v); q, k = rotation(norm(q)), rotation(norm(k))
        if self.rotation:
            self.rotation.rotate_backward(kernels, dqkv)
        if self.head_norm:
            self.head_norm.backward(dqkv)
        if self.value_residual:
            self.value_residual.backward(dqkv)
        # forward: qkv = x weight + bias
        dx = self.qkv_linear.backward(dqkv)
        self.workspace.release(dqkv)
        return dx
