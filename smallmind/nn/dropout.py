"""Dropout, with the addition to the residual stream that follows it."""

import numpy as np

from smallmind.nn.workspace import Workspace


class Dropout:
    """One place in the model where activations are dropped; `site` tells it from the others."""

    def __init__(self, workspace: Workspace, site: int) -> None:
        self.workspace = workspace
        self.site = site

    @property
    def on(self) -> bool:
        """Whether this pass drops anything."""
        return self.workspace.drop_probability > 0

    def forward(self, y: np.ndarray, x: np.ndarray, plus: np.ndarray | None = None) -> None:
        """x (R, C) -> y (R, C) = x mask [+ plus (R, C)]. Writes y, which may be x."""
        workspace = self.workspace
        key = workspace.dropout_key(self.site)
        workspace.kernels.dropout(y, x, key, workspace.drop_probability, plus)

    def backward(self, dx: np.ndarray, dy: np.ndarray) -> None:
        """dy (R, C) -> dx (R, C). Writes dx, which may be dy."""
        # forward: y = x mask + plus
        self.forward(dx, dy)
