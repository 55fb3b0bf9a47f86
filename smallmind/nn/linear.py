"""y = x weight + bias."""

import numpy as np

from smallmind.nn.layer import Branch, Scope
from smallmind.nn.parameters import ZEROS, Normal, Role

INITIAL_DEVIATION = 0.02  # GPT-2's


class Linear(Branch, only_kernels=True):
    """y = x weight + bias: a matrix (in, out) and a vector (out,). See `build_linear`.

    bias: whether it has the vector; None: if the model has biases.

    widths: the columns of each matrix, if several stand side by side in this one. The results of a
    head are logits: never rounded to 16 bits.
    """

    def __init__(
        self,
        scope: Scope,
        shape: tuple[int, int],
        deviation: float = INITIAL_DEVIATION,
        role: Role = Role.MATRIX,
        bias: bool | None = None,
        widths: tuple[int, ...] = (),
    ) -> None:
        super().__init__(scope)
        self.shape = shape
        is_head = role == Role.HEAD
        self.rent = scope.workspace.rent_full_precision if is_head else scope.workspace.rent
        initialisation = Normal(deviation) if deviation else ZEROS
        self.weight = scope.declare("weight", shape, initialisation, role, widths)
        self.bias = scope.declare_bias(shape[1], bias)

    def forward(self, x: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """x (R, in) -> y (R, out) [+ addend (R, out)]; keeps x."""
        return self.multiply(self.rent(len(x), self.shape[1]), x, addend)

    def multiply(
        self,
        y: np.ndarray,
        x: np.ndarray,
        addend: np.ndarray | None = None,
        activation: np.ndarray | None = None,
    ) -> np.ndarray:
        """x (R, in) -> y (R, out) [+ addend (R, out)]; keeps x. Writes y, and activation = gelu(y).

        The activation (R, out) only if there is such an array, in the same pass over memory.
        """
        self.x, matrix, bias = x, self.weight.matrix, self.bias.compute
        by_rows = self.workspace.by_rows(matrix.has_blocks)
        matrix.multiply(self.kernels, y, x, bias, addend, by_rows, activation)
        return y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dx (R, in); adds to the gradients of weight and bias."""
        dx = self.backward_input(dy)
        self.backward_weight(self.x, dy)
        return dx

    def backward_input(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dx (R, in)."""
        # forward: y = x weight + bias
        dx = self.workspace.rent(len(dy), self.shape[0])
        self.weight.matrix.multiply_transposed(self.kernels, dx, dy)
        return dx

    def backward_weight(self, x: np.ndarray, dy: np.ndarray) -> None:
        """x (R, in), as in forward, dy (R, out) -> adds to the gradients of weight and bias."""
        # forward: y = x weight + bias
        kernels = self.kernels
        if self.weight.grad is not None:
            kernels.matmul_transpose_a(self.weight.grad, x, dy, self.weight.grad)
        if self.bias.grad is not None:
            kernels.column_sum(self.bias.grad, dy)
