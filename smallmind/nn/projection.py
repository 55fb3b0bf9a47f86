"""A branch's end, added to the residual stream: a linear layer, dropout, addition."""

import math
from collections.abc import Iterator

import numpy as np

from smallmind.nn.dropout import Dropout
from smallmind.nn.layer import Branch, Scope
from smallmind.nn.layers import build_linear
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.nn.parameters import Parameter


class Projection(Branch, only_kernels=True):
    """y = dropout(x weight + bias); without dropout the product itself adds the addend."""

    def __init__(self, scope: Scope, inputs: int) -> None:
        super().__init__(scope)
        # Each block adds to the residual stream twice: so its variance does not grow with depth.
        deviation = INITIAL_DEVIATION / math.sqrt(2 * scope.config.n_layer)
        deviation = 0.0 if scope.config.zero_init else deviation
        self.linear = build_linear(scope, (inputs, scope.config.n_embd), deviation=deviation)
        self.dropout = Dropout(scope)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Returns the parameters of the linear layer, by the names that they have there."""
        return self.linear.named_parameters(prefix)

    def forward(self, x: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """x (R, in) -> y (R, C) [+ addend (R, C)]; keeps x."""
        if not self.dropout.on:
            return self.linear.forward(x, addend)
        workspace, C = self.workspace, self.linear.shape[1]
        projected = self.linear.multiply(workspace.rent_full_precision(len(x), C), x)
        y = workspace.rent(*projected.shape)
        self.dropout.drop(y, projected, addend)
        workspace.release(projected)
        return y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, in); adds to the gradients of weight and bias."""
        dx = self.backward_input(dy)
        self.backward_weight(self.linear.x)
        return dx

    def backward_input(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, in); keeps dy after dropout for `backward_weight`."""
        self.dprojected = dy
        if self.dropout.on:
            # forward: y = dropout(projected)
            self.dprojected = self.workspace.rent(*dy.shape)
            self.dropout.drop(self.dprojected, dy)
        return self.linear.backward_input(self.dprojected)

    def backward_weight(self, x: np.ndarray) -> None:
        """x (R, in), as in forward -> adds to the gradients of weight and bias."""
        self.linear.backward_weight(x, self.dprojected)
        if self.dropout.on:
            self.workspace.release(self.dprojected)
