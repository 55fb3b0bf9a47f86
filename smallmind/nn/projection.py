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
        self.linear = Linear(workspace, parameters, name)
        self.dropout = Dropout(workspace, dropout_site)

    def forward(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """x (R, in), residual (R, out) -> y (R, out)."""
        self.dropped = self.workspace.drop_probability > 0
        if self.dropped:
            return self.dropout.forward(self.linear.forward(x), plus=residual)
        return self.linear.forward(x, plus=residual)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dx (R, in). The gradient of residual is dy itself."""
        if not self.dropped:
            return self.linear.backward(dy)
        dprojected = self.dropout.backward(dy)
        dx = self.linear.backward(dprojected)
        self.workspace.release(dprojected)
        return dx
