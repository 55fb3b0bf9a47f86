"""Dropout, and the addition to the residual stream that follows it (Srivastava et al. 2014)."""

import numpy as np

from smallmind.nn.scope import Scope


class Dropout:
    """One place in the model where activations are dropped, named after the layer it is in."""

    def __init__(self, scope: Scope) -> None:
        self.workspace = scope.workspace
        self.name = scope.name
        self.site = scope.workspace.new_dropout_site()

    @property
    def on(self) -> bool:
        """Whether this pass drops anything."""
        return self.workspace.drop_probability > 0

    def mask(self) -> tuple[int, float, int]:
        """This pass's mask: its key, the probability of dropping, the first row in the batch."""
        workspace = self.workspace
        return workspace.dropout_key(self.site), workspace.drop_probability, workspace.first_row

    def forward(self, y: np.ndarray, x: np.ndarray, residual: np.ndarray | None = None) -> None:
        """x (R, C) -> y (R, C) = x mask [+ residual (R, C)]. Writes y, which may be x."""
        kernels = self.workspace.kernels_for(self.name)
        key, probability, first_row = self.mask()
        kernels.dropout(y, x, key, probability, residual, first_row)

    def backward(self, dx: np.ndarray, dy: np.ndarray) -> None:
        """dy (R, C) -> dx (R, C). Writes dx, which may be dy."""
        # forward: y = x mask + residual
        self.forward(dx, dy)
