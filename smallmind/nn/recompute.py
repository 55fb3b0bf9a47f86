"""Recompute, or activation checkpointing (Chen et al. 2016): less memory for one more forward pass.

The blocks are divided into segments. The forward pass keeps only the input of a segment; the
backward pass first runs the segment forward once more, keeping what backward needs. Dropout masks
depend only on counters and are the same both times, so the gradients are the same to the bit.
"""

from collections.abc import Sequence

import numpy as np

from smallmind.checks import InputError
from smallmind.nn.block import Block
from smallmind.nn.workspace import Workspace
from smallmind.settings.config import CheckpointStrategy, segment_length


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
        """Returns the plan of a strategy for n_layer blocks; only CUSTOM uses the interval."""
        length = segment_length(strategy, n_layer, interval)
        return cls(length, enabled=strategy != CheckpointStrategy.NONE)

    @property
    def state(self) -> tuple[bool, int]:
        """The settings that the plan depends on."""
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

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (B T, C) -> y (B T, C); keeps x and, in the last segment, all that backward needs."""
        self.inputs = [x]  # of the blocks
        kept = self.workspace.rented()
        for block in self.blocks:
            x = block.forward(x)
            if self.last:
                self.inputs.append(x)
            else:
                self.workspace.release_all_but(kept | {id(x)})
        return x

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C), in place. Calls `after_block` of the pass for each block."""
        at = self.workspace.now
        if not self.last:
            with self.workspace.profile("Recompute"):
                for block in self.blocks[:-1]:
                    self.inputs.append(block.forward(self.inputs[-1]))
                self.blocks[-1].recompute(self.inputs[-1])
        dx = dy
        for i in reversed(range(len(self.blocks))):
            dx = self.blocks[i].backward(dx)
            if i:
                self.workspace.release(self.inputs[i])
            if at and at.after_block:
                at.after_block()
        return dx
