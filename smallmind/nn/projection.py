"""What adds to the residual stream: a linear layer, dropout, addition."""

import math

import numpy as np

from smallmind.nn.dropout import Dropout
from smallmind.nn.linear import INITIAL_DEVIATION, Linear
from smallmind.nn.scope import Scope


class Projection:
    """y = residual + dropout(x weight + bias); without dropout the linear layer adds residual."""

    def __init__(self, scope: Scope, inputs: int) -> None:
        self.workspace = scope.workspace
        # Each block adds to the residual stream twice: so its variance does not grow with depth.
        deviation = INITIAL_DEVIATION / math.sqrt(2 * scope.config.n_layer)
        deviation = 0.0 if scope.config.zero_init else deviation
        self.linear = Linear(scope, (inputs, scope.config.n_embd), deviation)
        self.dropout = Dropout(scope)

    def forward(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """x (R, in), residual (R, C) -> y (R, C)."""
        if not self.dropout.on:
            return self.linear.forward(x, residual)
        projected = self.linear.forward_full_precision(x)
        y = self.workspace.rent(*projected.shape)
        self.dropout.forward(y, projected, residual)
        self.workspace.release(projected)
        return y

    def backward_input(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, in); keeps dy after dropout. The gradient of residual is dy."""
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
