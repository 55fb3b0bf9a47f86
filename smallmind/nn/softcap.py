"""Soft capping of logits (Gemma Team 2024): no prediction becomes too certain."""

import numpy as np

from smallmind.nn.scope import Scope


class SoftCap:
    """logits = cap tanh(logits / cap)."""

    def __init__(self, scope: Scope) -> None:
        self.workspace = scope.workspace
        self.name = scope.name
        self.cap = scope.config.logit_softcap

    def forward(self, logits: np.ndarray) -> None:
        """logits (R, V) -> the capped ones, in place; keeps a copy, as the loss overwrites them."""
        kernels = self.workspace.kernels_for(self.name)
        kernels.softcap(logits, logits, self.cap)
        if self.workspace.training:
            self.kept = self.workspace.rent_full_precision(*logits.shape)
            kernels.copy_columns(self.kept, logits, 0)

    def backward(self, dlogits: np.ndarray) -> None:
        """dlogits (R, V), the gradient of the capped logits -> that of the logits, in place."""
        # forward: capped = cap tanh(logits / cap)
        kernels = self.workspace.kernels_for(self.name)
        kernels.softcap_backward(dlogits, dlogits, self.kept, self.cap)
        self.workspace.release(self.kept)
