"""Rotary position embedding (Su et al. 2021): positions as rotations of queries and keys."""

from typing import Any

import numpy as np

from smallmind.nn.layer import Scope
from smallmind.nn.position import Position


class RotaryPosition(Position, only_kernels=True, page="rope"):
    """a, b = a cos w - b sin w, a sin w + b cos w, where w = t theta^(-2 i / D).

    a and b are channels i and i + D / 2 of a head of queries or keys at position t.
    """

    rotates = True

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        config = scope.config
        self.theta = config.rope_theta
        self.heads, self.D = config.n_head + config.kv_heads, config.head_channels

    def rotate(self, kernels: Any, x: np.ndarray) -> None:
        """x (B T, W) -> the same with its heads rotated, in place; keeps nothing."""
        theta, *places = self.angles()
        kernels.rope(x, theta, self.workspace.T, self.heads, self.D, *places)

    def rotate_backward(self, kernels: Any, dx: np.ndarray) -> None:
        """dx (B T, W), the gradient of the rotated heads -> that of the heads, in place."""
        # forward: heads = rotation heads
        kernels.rope(dx, self.theta, self.workspace.T, self.heads, self.D, inverse=True)

    def angles(self) -> tuple[Any, ...]:
        """-> the inputs of this pass's angles: theta, the first positions, the number of
        positions.
        """
        workspace = self.workspace
        positions = workspace.cache.positions if workspace.cache else workspace.T
        return self.theta, workspace.starts, positions

    def table_bytes(self, T: int) -> int:
        """Returns the size of the cosines and sines that the compiled kernel keeps."""
        positions = 2 ** (T - 1).bit_length()
        return 2 * 4 * positions * (self.D // 2)
