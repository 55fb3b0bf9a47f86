"""y = x weight + bias."""

import numpy as np

from smallmind.nn.parameters import NO_PARAMETER, ZEROS, Normal, Role
from smallmind.nn.scope import Scope

INITIAL_DEVIATION = 0.02  # GPT-2's


class Linear:
    """A matrix (in, out) and, if the model has biases, a vector (out,). Keeps no activations.

    widths: the columns of each matrix, if several stand side by side in this one.
    """

    def __init__(
        self,
        scope: Scope,
        shape: tuple[int, int],
        deviation: float = INITIAL_DEVIATION,
        role: Role = Role.MATRIX,
        bias: bool = True,
        widths: tuple[int, ...] = (),
    ) -> None:
        self.workspace = scope.workspace
        self.name = scope.name
        self.shape = shape
        initialisation = Normal(deviation) if deviation else ZEROS
        self.weight = scope.declare("weight", shape, initialisation, role, widths)
        self.bias = scope.declare_bias(shape[1]) if bias else NO_PARAMETER

    def forward(self, x: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
        """x (R, in) -> y (R, out) [+ residual]."""
        return self._forward(self.workspace.rent(len(x), self.shape[1]), x, residual)

    def forward_full_precision(self, x: np.ndarray) -> np.ndarray:
        """x (R, in) -> y (R, out), never rounded to 16 bits."""
        return self._forward(self.workspace.rent_full_precision(len(x), self.shape[1]), x, None)

    def _forward(self, y: np.ndarray, x: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
        kernels = self.workspace.kernels_for(self.name)
        kernels.matmul(y, x, self.weight.compute, self.bias.compute, residual)
        return y

    def forward_gelu(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, in) -> gelu(y), y (R, out), in one pass."""
        y = self.workspace.rent(len(x), self.shape[1])
        activation = self.workspace.rent(*y.shape)
        kernels = self.workspace.kernels_for(self.name)
        kernels.matmul_gelu(activation, y, x, self.weight.compute, self.bias.compute)
        return activation, y

    def backward_input(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dx (R, in)."""
        # forward: y = x weight + bias
        dx = self.workspace.rent(len(dy), self.shape[0])
        self.workspace.kernels_for(self.name).matmul_transpose_b(dx, dy, self.weight.compute)
        return dx

    def backward_weight(self, x: np.ndarray, dy: np.ndarray) -> None:
        """x (R, in), dy (R, out) -> adds to the gradients of weight and bias."""
        # forward: y = x weight + bias
        kernels = self.workspace.kernels_for(self.name)
        kernels.matmul_transpose_a(self.weight.grad, x, dy, self.weight.grad)
        if self.bias.grad is not None:
            kernels.column_sum(self.bias.grad, dy)
