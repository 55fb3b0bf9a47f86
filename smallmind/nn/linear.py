"""y = x weight + bias."""

import numpy as np

from smallmind.nn.parameters import Parameters
from smallmind.nn.workspace import Workspace


class Linear:
    """A matrix (in, out) and, if the model has biases, a vector (out,)."""

    def __init__(self, workspace: Workspace, parameters: Parameters, name: str) -> None:
        self.workspace = workspace
        self.weight = parameters.value[f"{name}.weight"]
        self.dweight = parameters.gradient[f"{name}.weight"]
        self.bias = parameters.value.get(f"{name}.bias")
        self.dbias = parameters.gradient.get(f"{name}.bias")

    def forward(self, x: np.ndarray, plus: np.ndarray | None = None) -> np.ndarray:
        """x (R, in) -> y (R, out) [+ plus]; keeps x and y."""
        self.x = x
        self.y = self.workspace.rent(len(x), self.weight.shape[1])
        self.workspace.kernels.matmul(self.y, x, self.weight, self.bias, plus)
        return self.y

    def forward_gelu(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, in) -> gelu(y), y (R, out), in one pass; keeps x and y, the caller gelu(y)."""
        self.x = x
        self.y = self.workspace.rent(len(x), self.weight.shape[1])
        activated = self.workspace.rent(*self.y.shape)
        self.workspace.kernels.matmul_gelu(activated, self.y, x, self.weight, self.bias)
        return activated, self.y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dx (R, in); adds to dweight and dbias."""
        kernels = self.workspace.kernels
        dx = self.workspace.rent(*self.x.shape)
        # forward: y = x weight + bias
        kernels.matmul_transpose_b(dx, dy, self.weight)
        kernels.matmul_transpose_a(self.dweight, self.x, dy, self.dweight)
        if self.dbias is not None:
            kernels.column_sum(self.dbias, dy)
        self.workspace.release(self.y)
        return dx
