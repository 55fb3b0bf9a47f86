"""Layer normalisation (Ba et al. 2016)."""

import numpy as np

from smallmind.nn.layer import Norm, Scope
from smallmind.nn.parameters import Constant, Role


class LayerNorm(Norm, only_kernels=True, page="layernorm"):
    """y = (x - mean(x)) / sqrt(variance(x) + epsilon) weight + bias, row by row.

    A gain (C,) and, if the model has biases, a shift (C,).
    """

    def __init__(self, scope: Scope, gain: float = 1.0) -> None:
        super().__init__(scope)
        C = scope.config.n_embd
        self.epsilon = scope.config.norm_epsilon
        self.weight = scope.declare("weight", (C,), Constant(gain), Role.GAIN)
        self.bias = scope.declare_bias(C)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> y (R, C); keeps x, and the mean and 1/deviation of each row."""
        self.x = x
        y = self.workspace.rent(*x.shape)
        self.mean = self.workspace.rent_full_precision(len(x))
        self.rstd = self.workspace.rent_full_precision(len(x))
        weight, bias = self.weight.compute, self.bias.compute
        self.kernels.layernorm(y, self.mean, self.rstd, x, weight, bias, self.epsilon)
        return y

    def backward(self, dy: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """dy (R, C) -> dx (R, C) or, in place of addend (R, C), addend + dx; adds to gradients."""
        # forward: y = (x - mean) rstd weight + bias
        dx, x, weight = self.gradient_of(self.x, addend), self.x, self.weight
        dweight, dbias = self.gradient(weight), self.bias.grad
        self.kernels.layernorm_backward(
            dx, dweight, dbias, dy, x, self.mean, self.rstd, weight.compute, addend
        )
        self.workspace.release(self.mean, self.rstd)
        return dx
