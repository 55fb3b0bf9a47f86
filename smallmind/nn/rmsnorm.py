"""RMS normalisation (Zhang & Sennrich 2019), of the residual stream and of queries and keys."""

import numpy as np

from smallmind.nn.parameters import ONES, Constant, Role
from smallmind.nn.scope import Scope


class RMSNorm:
    """A gain (C,)."""

    def __init__(self, scope: Scope, gain: float = 1.0) -> None:
        self.workspace = scope.workspace
        self.name = scope.name
        self.epsilon = scope.config.norm_epsilon
        shape = (scope.config.n_embd,)
        self.weight = scope.declare("weight", shape, Constant(gain), Role.GAIN)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> y (R, C); keeps x, y and 1 / the root mean square of each row."""
        self.x = x
        self.y = self.workspace.rent(*x.shape)
        self.rstd = self.workspace.rent_full_precision(len(x), 1)
        kernels = self.workspace.kernels_for(self.name)
        kernels.rmsnorm(self.y, self.rstd, x, self.weight.compute, epsilon=self.epsilon)
        return self.y

    def backward(self, dy: np.ndarray, dx: np.ndarray, residual: np.ndarray | None) -> None:
        """dy (R, C) -> dx (R, C) [+ residual, the gradient that bypasses this norm]. Writes dx.

        Adds to the gradient of weight. Releases x, which nothing else needs by then.
        """
        # forward: y = x rstd weight
        kernels = self.workspace.kernels_for(self.name)
        weight = self.weight
        kernels.rmsnorm_backward(dx, weight.grad, dy, self.x, self.rstd, weight.compute, residual)
        self.workspace.release(self.x, self.y, self.rstd)


class HeadNorm:
    """Normalises `heads` heads of D channels in place (Henry et al. 2020), with one gain (D,).

    The heads are the columns from `first` on of a matrix that has others too.
    """

    def __init__(self, scope: Scope, first: int, heads: int) -> None:
        D = scope.config.head_channels
        self.workspace = scope.workspace
        self.name = scope.name
        self.epsilon = scope.config.norm_epsilon
        self.first, self.heads, self.width = first, heads, heads * D
        self.weight = scope.declare("weight", (D,), ONES, Role.GAIN)

    def forward(self, x: np.ndarray) -> None:
        """x (R, W) -> the same with its heads normalised; keeps them as they were. Writes x."""
        R = len(x)
        self.kept = self.workspace.rent(R, self.width)
        self.rstd = self.workspace.rent_full_precision(R, self.heads)
        kernels = self.workspace.kernels_for(self.name)
        kernels.copy_columns(self.kept, x, self.first)
        kernels.rmsnorm(x, self.rstd, self.kept, self.weight.compute, self.first, self.epsilon)

    def backward(self, dx: np.ndarray) -> None:
        """dx (R, W), the gradient of the normalised heads -> that of the heads. Writes dx."""
        # forward: heads = heads rstd weight
        weight, kernels = self.weight, self.workspace.kernels_for(self.name)
        kernels.rmsnorm_backward(
            dx, weight.grad, dx, self.kept, self.rstd, weight.compute, None, self.first
        )
        self.workspace.release(self.kept, self.rstd)
