"""Dropout, and the addition to the residual stream that follows it (Srivastava et al. 2014)."""

import numpy as np

from smallmind.nn.layer import Layer, Scope


class Dropout(Layer):
    """One place in the model where activations are dropped, named after the layer it is in."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.key = scope.workspace.new_dropout_key()

    @property
    def on(self) -> bool:
        """True if this pass drops anything."""
        return self.workspace.drop_probability > 0

    def mask(self) -> tuple[np.ndarray, float, np.ndarray]:
        """This pass's mask: its key, the probability of dropping, the first row in the batch."""
        return self.key, self.workspace.drop_probability, self.workspace.first_row

    def drop(self, y: np.ndarray, x: np.ndarray, addend: np.ndarray | None = None) -> None:
        """x (R, C) -> y (R, C) = x mask [+ addend (R, C)], or its gradient. Writes y, may be x."""
        key, probability, first_row = self.mask()
        self.kernels.dropout(y, x, key, probability, addend, first_row)
