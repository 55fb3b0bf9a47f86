"""Rotary position embedding (Su et al. 2021): positions as rotations of queries and keys."""

import copy
import math
from typing import Any

import numpy as np

from smallmind.kernels.reference import rotary_frequencies
from smallmind.nn.layer import Scope
from smallmind.nn.position import Position
from smallmind.settings.config import ModelConfig


class RotaryPosition(Position, only_kernels=True, page="rope"):
    """a, b = a cos w - b sin w, a sin w + b cos w, where w = t f, f = theta^(-2 i / R).

    a and b are channels i and i + R / 2 of a head of queries or keys at position t: the first R of
    its D channels are rotated, `rotary_share` of them. The frequencies f may be scaled: see
    `scaled`. Blocks may differ: those that `rotary_layers` leaves out have no rotation, and those
    with a window of attention have the base `window_theta`, if there is one, without scaling.
    """

    rotates = True

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._scope, config = scope, scope.config
        self.heads, self.D = config.n_head + config.kv_heads, config.head_channels
        self.frequencies = scaled(self._frequencies(config.rope_theta), config)

    def _frequencies(self, theta: float) -> tuple[float, ...]:
        return rotary_frequencies(theta, self._scope.config.rotary_channels)

    def rotate(self, kernels: Any, x: np.ndarray) -> None:
        """x (B T, W) -> the same with its heads rotated, in place; keeps nothing."""
        frequencies, *places = self.angles()
        kernels.rope(x, frequencies, self.workspace.T, self.heads, self.D, *places)

    def rotate_backward(self, kernels: Any, dx: np.ndarray) -> None:
        """dx (B T, W), the gradient of the rotated heads -> that of the heads, in place."""
        # forward: heads = rotation heads
        kernels.rope(dx, self.frequencies, self.workspace.T, self.heads, self.D, inverse=True)

    def angles(self) -> tuple[Any, ...]:
        """-> the inputs of this pass's angles: frequencies, the first positions, the number of
        positions.
        """
        workspace = self.workspace
        positions = workspace.cache.positions if workspace.cache else workspace.T
        return self.frequencies, workspace.starts, positions

    def in_block(self, number: int) -> Position:
        """Returns the rotation of one block, or an encoding of nothing."""
        config = self._scope.config
        if not config.of_block("rotary_layers", number):
            return Position(self._scope)
        theta = config.part_setting("window_theta")
        if theta is None or config.window_of(number) is None:
            return self
        other = copy.copy(self)
        other.frequencies = self._frequencies(theta)
        return other

    def table_bytes(self, T: int) -> int:
        """Returns the size of the cosines and sines that the compiled kernel keeps."""
        positions = 2 ** (T - 1).bit_length()
        kinds = {self.in_block(i).frequencies or () for i in range(self._scope.config.n_layer)}
        return 2 * 4 * positions * sum(map(len, kinds))


def scaled(frequencies: tuple[float, ...], config: ModelConfig) -> tuple[float, ...]:
    """Returns the frequencies of a longer context, as `rope_scaling` says, or the same.

    ("linear", factor) divides them all (Chen et al. 2023). ("llama3", factor, low, high, context)
    divides those whose wavelengths are above context / low, keeps those below context / high, and
    blends between (Llama 3.1, Grattafiori et al. 2024). Rounded as in PyTorch.
    """
    f = np.array(frequencies, np.float32)
    match config.part_setting("rope_scaling"):
        case ("linear", factor):
            f = f / factor
        case ("llama3", factor, low, high, context):
            wavelengths = 2 * math.pi / f
            kept = (context / wavelengths - low) / (high - low)
            blended = (1 - kept) * f / factor + kept * f
            f = np.where(wavelengths > context / low, f / factor, blended)
            f = np.where(wavelengths < context / high, frequencies, f)
        case _:
            return frequencies
    return tuple(f.tolist())
