"""RMS normalisation (Zhang & Sennrich 2019), of the residual stream and of queries and keys."""

import numpy as np

from smallmind.nn.layer import Layer, Norm, Scope
from smallmind.nn.parameters import ONES, Constant, Role
from smallmind.nn.position import Position


class RMSNorm(Norm, only_kernels=True, page="rmsnorm"):
    """y = x / sqrt(mean(x^2) + epsilon) weight, row by row, with a gain (C,)."""

    def __init__(self, scope: Scope, gain: float = 1.0) -> None:
        super().__init__(scope)
        self.epsilon = scope.config.norm_epsilon
        shape = (scope.config.n_embd,)
        self.weight = scope.declare("weight", shape, Constant(gain), Role.GAIN)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> y (R, C); keeps x and 1 / the root mean square of each row."""
        self.x = x
        y = self.workspace.rent(*x.shape)
        self.rstd = self.workspace.rent_full_precision(len(x))
        self.kernels.rmsnorm(y, self.rstd, x, self.weight.compute, epsilon=self.epsilon)
        return y

    def backward(self, dy: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """dy (R, C) -> dx (R, C) or, in place of addend (R, C), addend + dx; adds to gradients."""
        # forward: y = x rstd weight
        dx, x, weight = self.gradient_of(self.x, addend), self.x, self.weight
        dweight = self.gradient(weight)
        self.kernels.rmsnorm_backward(dx, dweight, dy, x, self.rstd, weight.compute, addend)
        self.workspace.release(self.rstd)
        return dx


class HeadNorm(Layer, only_kernels=True):
    """q = rotation(q / sqrt(mean(q^2) + epsilon) gain), head by head, and k likewise.

    See Henry et al. (2020). It rotates if `position` has angles for it.

    A gain (D,) for all heads of queries and one for those of keys. The H heads of queries and G of
    keys are the first columns of a matrix that has others too.
    """

    def __init__(self, scope: Scope, H: int, G: int, position: Position) -> None:
        super().__init__(scope.inner("head_norm"))
        config, D = scope.config, scope.config.head_channels
        self.epsilon = config.norm_epsilon
        self.queries, self.heads, self.width = H, H + G, (H + G) * D
        self.position = position
        self.query_gain = scope.inner("query_norm").declare("weight", (D,), ONES, Role.GAIN)
        self.key_gain = scope.inner("key_norm").declare("weight", (D,), ONES, Role.GAIN)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (B T, W) -> the same with its heads normalised and rotated, in place.

        Keeps the heads as they were, and 1 / the root mean square of each.
        """
        self.kept = self.workspace.rent(len(x), self.width)
        self.rstd = self.workspace.rent_full_precision(len(x), self.heads)
        self.kernels.norm_heads(
            x,
            self.kept,
            self.rstd,
            self.query_gain.compute,
            self.key_gain.compute,
            self.queries,
            self.workspace.T,
            *self.position.angles(),
            epsilon=self.epsilon,
        )
        return x

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, W), the gradient of the result -> that of the heads, in place."""
        # forward: heads = rotation (heads rstd gain)
        query_gain, key_gain = self.query_gain, self.key_gain
        self.kernels.norm_heads_backward(
            dy,
            self.gradient(query_gain),
            self.gradient(key_gain),
            self.kept,
            self.rstd,
            query_gain.compute,
            key_gain.compute,
            self.queries,
            self.workspace.T,
            self.position.frequencies,
        )
        self.workspace.release(self.kept, self.rstd)
        return dy
