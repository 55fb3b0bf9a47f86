"""Layer normalisation (Ba et al. 2016)."""

import numpy as np

from smallmind.nn.parameters import Constant, Role
from smallmind.nn.scope import Scope


class LayerNorm:
    """A gain (C,) and, if the model has biases, a shift (C,)."""

    def __init__(self, scope: Scope, gain: float = 1.0) -> None:
        C = scope.config.n_embd
        self.workspace = scope.workspace
        self.name = scope.name
        self.epsilon = scope.config.norm_epsilon
        self.weight = scope.declare("weight", (C,), Constant(gain), Role.GAIN)
        self.bias = scope.declare_bias(C)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> y (R, C); keeps x, y, and the mean and 1/deviation of each row."""
        R, C = x.shape
        self.x = x
        self.y = self.workspace.rent(R, C)
        self.mean = self.workspace.rent_full_precision(R)
        self.rstd = self.workspace.rent_full_precision(R)
        self.workspace.kernels_for(self.name).layernorm(
            self.y, self.mean, self.rstd, x, self.weight.compute, self.bias.compute, self.epsilon
        )
        return self.y

    def backward(self, dy: np.ndarray, dx: np.ndarray, residual: np.ndarray | None) -> None:
        """dy (R, C) -> dx (R, C) [+ residual, the gradient that bypasses this norm]. Writes dx.

        Adds to the gradients of weight and bias. Releases x, which nothing else needs by then.
        """
        # forward: y = (x - mean) rstd weight + bias
        self.workspace.kernels_for(self.name).layernorm_backward(
            dx,
            self.weight.grad,
            self.bias.grad,
            dy,
            self.x,
            self.mean,
            self.rstd,
            self.weight.compute,
            residual,
        )
        self.workspace.release(self.x, self.y, self.mean, self.rstd)
