"""The two-layer perceptron of a block: C -> 4C, GELU, 4C -> C."""

import numpy as np

from smallmind.nn.linear import Linear
from smallmind.nn.parameters import Parameters
from smallmind.nn.projection import Projection
from smallmind.nn.workspace import Workspace


class MLP:
    def __init__(self, workspace: Workspace, parameters: Parameters, name: str, site: int) -> None:
        self.workspace = workspace
        self.expansion = Linear(workspace, parameters, f"{name}.expansion")
        self.projection = Projection(workspace, parameters, f"{name}.projection", site)

    def forward(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """x, residual (R, C) -> residual + mlp(x); keeps the hidden layer before and after GELU."""
        self.activated, self.before = self.expansion.forward_gelu(x)
        return self.projection.forward(self.activated, residual)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, C)."""
        dhidden = self.projection.backward(dy)
        # forward: activated = gelu(before)
        self.workspace.kernels.gelu_backward(dhidden, dhidden, self.before)
        self.workspace.release(self.activated)
        dx = self.expansion.backward(dhidden)
        self.workspace.release(dhidden)
        return dx
