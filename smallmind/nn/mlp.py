"""The two-layer perceptron of a block: C -> 4C, GELU, 4C -> C."""

import numpy as np

from smallmind.nn.linear import Linear
from smallmind.nn.parameters import Parameters
from smallmind.nn.projection import Projection
from smallmind.nn.workspace import Workspace


class MLP:
    def __init__(self, workspace: Workspace, parameters: Parameters, name: str, site: int) -> None:
        self.workspace = workspace
        self.name = name
        self.expansion = Linear(workspace, parameters, f"{name}.expansion")
        self.projection = Projection(workspace, parameters, f"{name}.projection", site)

    def forward(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """x, residual (R, C) -> residual + mlp(x); keeps x and the hidden layer before GELU."""
        self.x = x
        activated, self.before = self.expansion.forward_gelu(x)
        y = self.projection.forward(activated, residual)
        self.workspace.release(activated)
        return y

    def recompute(self, x: np.ndarray) -> None:
        """x (R, C); keeps what forward keeps."""
        self.x = x
        self.before = self.expansion.forward(x)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, C)."""
        # forward: y = projection(activated)
        dactivated = self.projection.backward_input(dy)
        # forward: activated = gelu(before)
        # Where dactivated was, there is activated again; the gradient of before takes its place.
        activated, dbefore = dactivated, self.before
        self.workspace.kernels.gelu_backward(dbefore, activated, dactivated, self.before)
        self.projection.backward_weight(activated)
        self.workspace.release(activated)
        # forward: before = expansion(x)
        self.expansion.backward_weight(self.x, dbefore)
        dx = self.expansion.backward_input(dbefore)
        self.workspace.release(dbefore)
        return dx
