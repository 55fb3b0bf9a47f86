"""Soft capping of logits (Gemma Team 2024): no prediction becomes too certain."""

import numpy as np

from smallmind.nn.layer import Layer, Scope


class SoftCap(Layer, only_kernels=True):
    """logits = cap tanh(logits / cap)."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.cap = scope.config.logit_softcap

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, V), logits -> the capped ones, in place; keeps a copy: the loss overwrites them."""
        kernels = self.kernels
        kernels.softcap(x, x, self.cap)
        if self.workspace.training:
            self.kept = self.workspace.rent_full_precision(*x.shape)
            kernels.copy_columns(self.kept, x, 0)
        return x

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, V), the gradient of the capped logits -> that of the logits, in place."""
        # forward: capped = cap tanh(logits / cap)
        self.kernels.softcap_backward(dy, dy, self.kept, self.cap)
        self.workspace.release(self.kept)
        return dy
