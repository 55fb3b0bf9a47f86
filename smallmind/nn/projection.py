"""A branch's end, added to the residual stream: a linear layer, dropout, addition."""

import math

import numpy as np

from smallmind.nn.dropout import Dropout
from smallmind.nn.layer import Scope
from smallmind.nn.linear import INITIAL_DEVIATION, Linear


class Projection(Linear):
    """y = dropout(x weight + bias); without dropout the product itself adds the addend."""

    def __init__(self, scope: Scope, inputs: int) -> None:
        # Each block adds to the residual stream twice: so its variance does not grow with depth.
        deviation = INITIAL_DEVIATION / math.sqrt(2 * scope.config.n_layer)
        deviation = 0.0 if scope.config.zero_init else deviation
        super().__init__(scope, (inputs, scope.config.n_embd), deviation)
        self.dropout = Dropout(scope)

    def forward(self, x: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """x (R, in) -> y (R, C) [+ addend (R, C)]; keeps x."""
        if not self.dropout.on:
            return super().forward(x, addend)
        projected = self.multiply(self.workspace.rent_full_precision(len(x), self.shape[1]), x)
        y = self.workspace.rent(*projected.shape)
        self.dropout.drop(y, projected, addend)
        self.workspace.release(projected)
        return y

    def backward_input(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, in); keeps dy after dropout for `backward_weight`."""
        if not self.dropout.on:
            return super().backward_input(dy)
        # forward: y = dropout(projected)
        dprojected = self.workspace.rent(*dy.shape)
        self.dropout.drop(dprojected, dy)
        return super().backward_input(dprojected)

    def backward_weight(self, x: np.ndarray) -> None:
        """x (R, in), as in forward -> adds to the gradients of weight and bias."""
        super().backward_weight(x)
        if self.dropout.on:
            self.workspace.release(self.dy)
