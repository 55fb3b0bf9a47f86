"""Layer normalisation."""

import numpy as np

from smallmind.nn.parameters import Parameters
from smallmind.nn.workspace import Workspace


class LayerNorm:
    """A gain (C,) and, if the model has biases, a shift (C,)."""

    def __init__(self, workspace: Workspace, parameters: Parameters, name: str) -> None:
        self.workspace = workspace
        self.name = name
        self.weight = parameters.compute[f"{name}.weight"]
        self.dweight = parameters.grad_views[f"{name}.weight"]
        self.bias = parameters.compute.get(f"{name}.bias")
        self.dbias = parameters.grad_views.get(f"{name}.bias")

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> y (R, C); keeps x, y, and the mean and 1/deviation of each row."""
        R, C = x.shape
        self.x = x
        self.y = self.workspace.rent(R, C)
        self.mean, self.rstd = (
            self.workspace.rent_full_precision(R),
            self.workspace.rent_full_precision(R),
        )
        self.workspace.kernels.layernorm(self.y, self.mean, self.rstd, x, self.weight, self.bias)
        return self.y

    def backward(self, dy: np.ndarray, dx: np.ndarray, plus: np.ndarray | None) -> None:
        """dy (R, C) -> dx (R, C) [+ plus, the gradient that bypasses this norm]. Writes dx.

        Adds to dweight and dbias. The norm is the last that needs x, and releases it.
        """
        # forward: y = (x - mean) rstd weight + bias
        self.workspace.kernels.layernorm_backward(
            dx, self.dweight, self.dbias, dy, self.x, self.mean, self.rstd, self.weight, plus
        )
        self.workspace.release(self.x, self.y, self.mean, self.rstd)
