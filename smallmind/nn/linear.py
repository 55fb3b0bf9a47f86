"""y = x weight + bias."""

import numpy as np

from smallmind.nn.parameters import Parameters
from smallmind.nn.workspace import Workspace


class Linear:
    """A matrix (in, out) and, if the model has biases, a vector (out,). Keeps no activations."""

    def __init__(self, workspace: Workspace, parameters: Parameters, name: str) -> None:
        self.workspace = workspace
        self.name = name
        self.weight = parameters.compute[f"{name}.weight"]
        self.dweight = parameters.grad_views[f"{name}.weight"]
        self.bias = parameters.compute.get(f"{name}.bias")
        self.dbias = parameters.grad_views.get(f"{name}.bias")

    def forward(
        self, x: np.ndarray, plus: np.ndarray | None = None, exact: bool = False
    ) -> np.ndarray:
        """x (R, in) -> y (R, out) [+ plus]; exact: not rounded to 16 bits."""
        rent = self.workspace.rent_full_precision if exact else self.workspace.rent
        y = rent(len(x), self.weight.shape[1])
        self.workspace.kernels.matmul(y, x, self.weight, self.bias, plus)
        return y

    def forward_gelu(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, in) -> gelu(y), y (R, out), in one pass."""
        y = self.workspace.rent(len(x), self.weight.shape[1])
        activated = self.workspace.rent(*y.shape)
        self.workspace.kernels.matmul_gelu(activated, y, x, self.weight, self.bias)
        return activated, y

    def backward_input(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dx (R, in)."""
        # forward: y = x weight + bias
        dx = self.workspace.rent(len(dy), len(self.weight))
        self.workspace.kernels.matmul_transpose_b(dx, dy, self.weight)
        return dx

    def backward_weight(self, x: np.ndarray, dy: np.ndarray) -> None:
        """x (R, in), dy (R, out) -> adds to dweight and dbias."""
        # forward: y = x weight + bias
        self.workspace.kernels.matmul_transpose_a(self.dweight, x, dy, self.dweight)
        if self.dbias is not None:
            self.workspace.kernels.column_sum(self.dbias, dy)
