"""Dropout, and the addition to the residual stream that follows it (Srivastava et al. 2014)."""

import numpy as np

from smallmind.nn.layer import Layer, Scope


class Dropout(Layer, only_kernels=True):
    """y = x mask / (1 - p) + addend, where mask is 0 with probability p, else 1.

    It is named after the layer it is in, and p is that of the model unless it has its own.
    """

    def __init__(self, scope: Scope, probability: float | None = None) -> None:
        super().__init__(scope)
        self._probability = probability
        self.key = scope.workspace.new_dropout_key(probability or 0.0)

    @property
    def probability(self) -> float:
        """The share of activations that this pass drops."""
        workspace = self.workspace
        if self._probability is None:
            return workspace.drop_probability
        return self._probability if workspace.drops else 0.0

    @property
    def on(self) -> bool:
        """True if this pass drops anything."""
        return self.probability > 0

    def mask(self) -> tuple[np.ndarray, float, np.ndarray]:
        """-> this pass's mask: its key, the probability of dropping, the first row in the batch."""
        return self.key, self.probability, self.workspace.first_row

    def drop(self, y: np.ndarray, x: np.ndarray, addend: np.ndarray | None = None) -> None:
        """x (R, C) -> y (R, C) = x mask [+ addend (R, C)], or its gradient. Writes y, may be x."""
        key, probability, first_row = self.mask()
        self.kernels.dropout(y, x, key, probability, addend, first_row)
