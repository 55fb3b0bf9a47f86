"""The two-layer perceptron of a block: C -> 4C, GELU, 4C -> C."""

import numpy as np

from smallmind.nn.linear import Linear
from smallmind.nn.projection import Projection
from smallmind.nn.scope import Scope


class MLP:
    """y = residual + projection(gelu(expansion(x)))."""

    def __init__(self, scope: Scope) -> None:
        C = scope.config.n_embd
        self.workspace = scope.workspace
        self.name = scope.name
        self.expansion = Linear(scope.inner("expansion"), (C, 4 * C))
        self.projection = Projection(scope.inner("projection"), 4 * C)

    def forward(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """x, residual (R, C) -> residual + mlp(x); keeps x and the preactivation (R, 4C)."""
        self.x = x
        activation, self.preactivation = self.expansion.forward_gelu(x)
        y = self.projection.forward(activation, residual)
        self.workspace.release(activation)
        return y

    def recompute(self, x: np.ndarray) -> None:
        """x (R, C); keeps what forward keeps."""
        self.x = x
        self.preactivation = self.expansion.forward(x)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, C)."""
        # forward: y = projection(activation)
        dactivation = self.projection.backward_input(dy)
        # forward: activation = gelu(preactivation)
        # In place: recomputes the activation into dactivation's buffer, and writes the gradient of
        # the preactivation over the preactivation.
        activation, dpreactivation = dactivation, self.preactivation
        kernels = self.workspace.kernels_for(self.name)
        kernels.gelu_backward(dpreactivation, activation, dactivation, self.preactivation)
        self.projection.backward_weight(activation)
        self.workspace.release(activation)
        # forward: preactivation = expansion(x)
        self.expansion.backward_weight(self.x, dpreactivation)
        dx = self.expansion.backward_input(dpreactivation)
        self.workspace.release(dpreactivation)
        return dx
