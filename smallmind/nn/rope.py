"""Rotary position embedding (Su et al. 2021): positions as rotations of queries and keys."""

import numpy as np

from smallmind.nn.scope import Scope


def table_bytes(T: int, D: int) -> int:
    """The size of the cosines and sines that the compiled kernel keeps for windows of T tokens."""
    positions = 2 ** (T - 1).bit_length()
    return 2 * 4 * positions * (D // 2)


class RotaryEmbedding:
    """Rotates the first `heads` heads of each row by an angle that grows with its position."""

    def __init__(self, scope: Scope, heads: int) -> None:
        self.workspace = scope.workspace
        self.name = scope.name
        self.theta = scope.config.rope_theta
        self.heads, self.D = heads, scope.config.head_channels

    def forward(self, x: np.ndarray, T: int) -> None:
        """x (B T, W) -> the same with its heads rotated. Writes x; keeps nothing."""
        kernels, (theta, *places) = self.workspace.kernels_for(self.name), self.angles(T)
        kernels.rope(x, theta, T, self.heads, self.D, *places)

    def angles(self, T: int) -> tuple[float, np.ndarray | None, int]:
        """What they follow from in windows of T tokens: theta, the first position, how many."""
        cache = self.workspace.cache
        return self.theta, self.workspace.start, cache.positions if cache else T

    def backward(self, dx: np.ndarray, T: int) -> None:
        """dx (B T, W), the gradient of the rotated heads -> that of the heads. Writes dx."""
        # forward: heads = rotation heads
        kernels = self.workspace.kernels_for(self.name)
        kernels.rope(dx, self.theta, T, self.heads, self.D, inverse=True)
