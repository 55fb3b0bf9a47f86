"""RMS normalisation (Zhang & Sennrich 2019), of the residual stream and of queries and keys."""

import numpy as np

from smallmind.nn.parameters import ONES, Constant, Role
from smallmind.nn.rope import RotaryEmbedding
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
        self.rstd = self.workspace.rent_full_precision(len(x))
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
    """Normalises queries and keys head by head (Henry et al. 2020), and rotates them with `rotary`.

    A gain (D,) for all heads of queries and one for those of keys. The H heads of queries and G of
    keys are the first columns of a matrix that has others too.
    """

    def __init__(self, scope: Scope, H: int, G: int, rotary: RotaryEmbedding | None) -> None:
        config, D = scope.config, scope.config.head_channels
        self.workspace = scope.workspace
        self.name = scope.inner("head_norm").name
        self.epsilon = config.norm_epsilon
        self.queries, self.heads, self.width = H, H + G, (H + G) * D
        self.rotary = rotary
        self.query_gain = scope.inner("query_norm").declare("weight", (D,), ONES, Role.GAIN)
        self.key_gain = scope.inner("key_norm").declare("weight", (D,), ONES, Role.GAIN)

    def forward(self, x: np.ndarray, T: int) -> None:
        """x (B T, W) -> the same with its heads normalised and rotated. Writes x.

        Keeps the heads as they were, and 1 / the root mean square of each.
        """
        self.kept = self.workspace.rent(len(x), self.width)
        self.rstd = self.workspace.rent_full_precision(len(x), self.heads)
        rotation = self.rotary.angles(T) if self.rotary else ()
        gains = self.query_gain.compute, self.key_gain.compute
        self.workspace.kernels_for(self.name).norm_heads(
            x, self.kept, self.rstd, *gains, self.queries, T, *rotation, epsilon=self.epsilon
        )

    def backward(self, dx: np.ndarray, T: int) -> None:
        """dx (B T, W), the gradient of the result -> that of the heads. Writes dx."""
        # forward: heads = rotation (heads rstd gain)
        query_gain, key_gain = self.query_gain, self.key_gain
        given = self.kept, self.rstd, query_gain.compute, key_gain.compute, self.queries, T
        theta = self.rotary.theta if self.rotary else None
        self.workspace.kernels_for(self.name).norm_heads_backward(
            dx, query_gain.grad, key_gain.grad, *given, theta
        )
        self.workspace.release(self.kept, self.rstd)
