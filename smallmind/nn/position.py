"""Positions: how a model knows the order of its tokens."""

from typing import Any

import numpy as np

from smallmind import parts
from smallmind.nn.layer import Layer
from smallmind.nn.parameters import Parameter
from smallmind.settings.config import ModelConfig


class Position(Layer, only_kernels=True, page="none"):
    """x = token[ids]: the position encoding of a model, of which this one encodes nothing.

    It has two hooks, and a subclass has at least one of them: `embed`, where tokens enter the
    residual stream, and `rotate`, for the queries and keys of every block. They get the kernels of
    the layer that calls them. What else depends on positions asks for the facts below, never for a
    name.
    """

    limits_context = False  # it ends at block_size: a cache starts again there
    rotates = False  # attention calls `rotate`
    # One for each pair of channels, if `norm_heads` can rotate them, given `angles`.
    frequencies: tuple[float, ...] | None = None

    def embed(self, kernels: Any, x: np.ndarray, ids: np.ndarray, token: Parameter) -> None:
        """ids (B, T) -> x (B T, C), the rows of the tokens and what positions add. Writes x."""
        kernels.embedding(x, token.compute, ids, in_groups=token.matrix.in_groups)

    def embed_backward(
        self, kernels: Any, dx: np.ndarray, ids: np.ndarray, token: Parameter
    ) -> None:
        """dx (B T, C) -> adds to the gradients of the tokens and of its own parameters."""
        # forward: x = token[ids]
        kernels.embedding_backward(token.grad, None, dx, ids)

    def rotate(self, kernels: Any, x: np.ndarray) -> None:
        """x (B T, W) -> the same, its first columns, queries and keys, rotated in place."""

    def rotate_backward(self, kernels: Any, dx: np.ndarray) -> None:
        """dx (B T, W), the gradient of the rotated heads -> that of the heads, in place."""

    def angles(self) -> tuple[Any, ...]:
        """-> the arguments with which `norm_heads` rotates: frequencies, first positions, their
        number.
        """
        return ()

    def in_block(self, number: int) -> "Position":
        """Returns the encoding of one block, which may rotate by other angles, or not at all."""
        del number
        return self

    def table_bytes(self, T: int) -> int:
        """Returns the size of the tables that its kernels keep for windows of T tokens."""
        del T
        return 0


def position_class(config: ModelConfig) -> type[Position]:
    """Returns the class of a model's position encoding."""
    return parts.load(parts.POSITIONS, config.position)
