"""Rotary position embedding (Su et al. 2021): positions as rotations of queries and keys."""

import numpy as np

from smallmind.nn.layer import Layer, Scope


def table_bytes(T: int, D: int) -> int:
    """The size of the cosines and sines that the compiled kernel keeps for windows of T tokens."""
    positions = 2 ** (T - 1).bit_length()
    return 2 * 4 * positions * (D // 2)


class RotaryEmbedding(Layer):
    """Rotates the first `heads` heads of each row by an angle that grows with its position."""

    def __init__(self, scope: Scope, heads: int) -> None:
        super().__init__(scope)
        self.theta = scope.config.rope_theta
        self.heads, self.D = heads, scope.config.head_channels

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (B T, W) -> the same with its heads rotated, in place; keeps nothing."""
        theta, *places = self.angles()
        self.kernels.rope(x, theta, self.workspace.T, self.heads, self.D, *places)
        return x

    def angles(self) -> tuple[float, np.ndarray | None, int]:
        """The inputs of this pass's angles: theta, the first position, the number of positions."""
        workspace = self.workspace
        positions = workspace.cache.positions if workspace.cache else workspace.T
        return self.theta, workspace.start, positions

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, W), the gradient of the rotated heads -> that of the heads, in place."""
        # forward: heads = rotation heads
        self.kernels.rope(dy, self.theta, self.workspace.T, self.heads, self.D, inverse=True)
        return dy
