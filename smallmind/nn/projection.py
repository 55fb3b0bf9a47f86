"""The way back into the residual stream: linear, dropout, addition."""

import numpy as np

from smallmind.nn.dropout import Dropout
from smallmind.nn.linear import Linear
from smallmind.nn.parameters import Parameters
from smallmind.nn.workspace import Workspace


class Projection:
    """y = residual + dropout(x weight + bias); without dropout the linear layer adds by itself."""

    def __init__(
        self, workspace: Workspace, parameters: Parameters, name: str, dropout_site: int
    ) -> None:
        self.workspace = workspace
        self.name = name
        self.linear = Linear(workspace, parameters, name)
        self.dropout = Dropout(workspace, dropout_site)

    def forward(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """x (R, in), residual (R, out) -> y (R, out)."""
        if not self.dropout.on:
            return self.linear.forward(x, plus=residual)
        projected = self.linear.forward(x, exact=True)
        y = self.workspace.rent(*projected.shape)
        self.dropout.forward(y, projected, plus=residual)
        self.workspace.release(projected)
        return y

    def backward_input(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dx (R, in); keeps dy after dropout. The gradient of residual is dy."""
        self.dprojected = dy
        if self.dropout.on:
            self.dprojected = self.workspace.rent(*dy.shape)
            self.dropout.backward(self.dprojected, dy)
        return self.linear.backward_input(self.dprojected)

    def backward_weight(self, x: np.ndarray) -> None:
        """x (R, in) -> adds to the gradients of weight and bias; after `backward_input`."""
        self.linear.backward_weight(x, self.dprojected)
        if self.dropout.on:
            self.workspace.release(self.dprojected)
