"""Dropout, with the addition to the residual stream that follows it."""

import numpy as np

from smallmind.nn.workspace import Workspace


class Dropout:
    """One place in the model where activations are dropped; `site` tells it from the others."""

    def __init__(self, workspace: Workspace, site: int) -> None:
        self.workspace = workspace
        self.site = site

    def forward(self, x: np.ndarray, plus: np.ndarray | None = None) -> np.ndarray:
        """x (R, C) -> y (R, C) = x mask [+ plus]; keeps y."""
        workspace = self.workspace
        self.y = workspace.rent(*x.shape)
        key = workspace.dropout_key(self.site)
        workspace.kernels.dropout(self.y, x, key, workspace.drop_probability, plus)
        return self.y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, C)."""
        workspace = self.workspace
        dx = workspace.rent(*dy.shape)
        # forward: y = x mask + plus
        key = workspace.dropout_key(self.site)
        workspace.kernels.dropout(dx, dy, key, workspace.drop_probability)
        workspace.release(self.y)
        return dx
