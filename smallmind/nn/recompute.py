"""Recompute, or activation checkpointing (Chen et al. 2016): memory at the price of a forward pass.

The blocks are cut into segments. On the way forward only the input of a segment is kept; on the
way back the segment runs forward once more, now keeping what backward needs, and then back. The
masks of dropout follow from counters, so they are those of the first time: no gradient changes by
a bit.
"""

from collections.abc import Sequence

import numpy as np

from smallmind.config import CheckpointStrategy, InputError, segment_length
from smallmind.nn.block import Block
from smallmind.nn.workspace import Workspace


class CheckpointManager:
    """Which blocks are recomputed: segments of `checkpoint_interval` of them, or, disabled, none.

    Let a block keep K bytes for its backward pass, X of them its input, and let there be N blocks
    in segments of k. What is held at the peak, as the backward pass enters the last segment:

        NONE                       N K
        EVERY_LAYER  (k = 1)       (N - 1) X + K
        SQRT_LAYERS  (k = √N)      (√N - 1) X + √N K
        CUSTOM       (k)           (ceil(N / k) - 1) X + k K

    The last segment runs only once: what it keeps is needed at once. So does the head of the model.
    """

    def __init__(self, checkpoint_interval: int = 3, enabled: bool = True) -> None:
        if checkpoint_interval < 1:
            raise InputError(f"checkpoint_interval={checkpoint_interval} must be at least 1")
        self.checkpoint_interval = checkpoint_interval
        self.enabled = enabled

    @classmethod
    def of(
        cls, strategy: CheckpointStrategy, n_layer: int, interval: int = 3
    ) -> "CheckpointManager":
        """The manager of a strategy for n_layer blocks; CUSTOM takes the interval that is given."""
        length = segment_length(strategy, n_layer, interval)
        return cls(length, enabled=strategy != CheckpointStrategy.NONE)

    def segments(self, n_layer: int) -> list[range]:
        """n_layer -> the blocks of each segment. The last is the shortest: it is never rerun."""
        step = self.checkpoint_interval if self.enabled else max(1, n_layer)
        return [range(i, min(n_layer, i + step)) for i in range(0, n_layer, step)]


class Segment:
    """Blocks that run forward together, and are recomputed together unless they are `last`."""

    def __init__(self, workspace: Workspace, blocks: Sequence[Block], last: bool) -> None:
        self.workspace = workspace
        self.blocks = blocks
        self.last = last

    def forward(self, x: np.ndarray, T: int) -> np.ndarray:
        """x (B T, C) -> y (B T, C); keeps x, and the blocks what they need if this is the last."""
        workspace = self.workspace
        self.x, self.T = x, T
        if self.last and workspace.training:
            for block in self.blocks:
                x = block.forward(x, T)
            return x
        rented = workspace.rented() if workspace.training else workspace.rented() - {id(x)}
        for block in self.blocks:
            x = block.forward(x, T)
            workspace.release_all_but(rented | {id(x)})
        return x

    def backward(self, dx: np.ndarray) -> None:
        """dx (B T, C), the gradient of y -> the gradient of x, in its place."""
        if not self.last:
            with self.workspace.profile("Recompute"):
                x = self.x
                for block in self.blocks[:-1]:
                    x = block.forward(x, self.T)
                self.blocks[-1].recompute(x, self.T)
        for block in reversed(self.blocks):
            block.backward(dx)
