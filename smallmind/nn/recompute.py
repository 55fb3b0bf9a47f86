"""Recompute, or activation checkpointing (Chen et al. 2016): less memory for one more forward pass.

The blocks are divided into segments. The forward pass keeps only the input of a segment; the
backward pass first runs the segment forward once more, keeping what backward needs. Dropout masks
depend only on counters and are the same both times, so the gradients are the same to the bit.
"""

from collections.abc import Callable, Sequence

import numpy as np

from smallmind.checks import InputError
from smallmind.config import CheckpointStrategy, segment_length
from smallmind.nn.block import Block
from smallmind.nn.workspace import Workspace


class RecomputePlan:
    """Which blocks are recomputed: segments of `checkpoint_interval` blocks; none if not enabled.

    Let each of N blocks keep K bytes for its backward pass, X of them its input, in segments of k
    blocks. Memory peaks as the backward pass enters the last segment:

        NONE                       N K
        EVERY_LAYER  (k = 1)       (N - 1) X + K
        SQRT_LAYERS  (k = √N)      (√N - 1) X + √N K
        CUSTOM       (k)           (ceil(N / k) - 1) X + k K

    The last segment runs forward only once, as its backward pass follows at once.
    """

    def __init__(self, checkpoint_interval: int = 3, enabled: bool = True) -> None:
        if checkpoint_interval < 1:
            raise InputError(f"checkpoint_interval={checkpoint_interval} must be at least 1")
        self.checkpoint_interval = checkpoint_interval
        self.enabled = enabled

    @classmethod
    def of(cls, strategy: CheckpointStrategy, n_layer: int, interval: int = 3) -> "RecomputePlan":
        """The plan of a strategy for n_layer blocks; only CUSTOM uses the interval."""
        length = segment_length(strategy, n_layer, interval)
        return cls(length, enabled=strategy != CheckpointStrategy.NONE)

    @property
    def state(self) -> tuple[bool, int]:
        """What the plan depends on."""
        return self.enabled, self.checkpoint_interval

    def segments(self, n_layer: int) -> list[range]:
        """n_layer -> the blocks of each segment. The last is the shortest: it is not recomputed."""
        step = self.checkpoint_interval if self.enabled else max(1, n_layer)
        return [range(i, min(n_layer, i + step)) for i in range(0, n_layer, step)]


CheckpointManager = RecomputePlan  # the public name


class Segment:
    """Consecutive blocks that are recomputed together, unless they are the `last` segment."""

    def __init__(self, workspace: Workspace, blocks: Sequence[Block], last: bool) -> None:
        self.workspace = workspace
        self.blocks = blocks
        self.last = last

    def forward(self, x: np.ndarray, T: int) -> np.ndarray:
        """x (B T, C) -> y (B T, C); keeps x and, in the last segment, all that backward needs."""
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

    def backward(self, dx: np.ndarray, after_block: Callable[[], object] | None = None) -> None:
        """dx (B T, C), the gradient of y -> the gradient of x, in place.

        Calls after_block after each block.
        """
        if not self.last:
            with self.workspace.profile("Recompute"):
                x = self.x
                for block in self.blocks[:-1]:
                    x = block.forward(x, self.T)
                self.blocks[-1].recompute(x, self.T)
        for block in reversed(self.blocks):
            block.backward(dx)
            if after_block:
                after_block()
