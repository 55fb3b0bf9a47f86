"""The layers of a model in order: embedding, blocks, final norm, head."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from smallmind.nn.backend import dry_run_backend
from smallmind.nn.block import Block
from smallmind.nn.documents import Documents
from smallmind.nn.embedding import Embedding
from smallmind.nn.head import initial_gain
from smallmind.nn.layer import Scope
from smallmind.nn.layers import build_head, build_norm
from smallmind.nn.parameters import Parameters
from smallmind.nn.recompute import RecomputePlan, Segment
from smallmind.nn.residuals import Carried
from smallmind.nn.softcap import SoftCap
from smallmind.nn.workspace import Workspace
from smallmind.settings.config import ModelConfig


class Network:
    """Forward from ids to logits, and back. Parameters are declared, not yet allocated."""

    def __init__(self, workspace: Workspace, parameters: Parameters, config: ModelConfig) -> None:
        scope = Scope(workspace, parameters, config)
        self.workspace = workspace
        self.documents = Documents(scope.inner("documents"))
        self.embedding = Embedding(scope.inner("embedding"))
        self.x0 = Carried(workspace, "embedding_residual") if config.x0_scalars else None
        first_values = Carried(workspace, "first_values") if config.value_residual else None
        self.blocks = []
        self.specs_of_blocks: list[range] = []  # numbers of the parameters that each declares
        for i in range(config.n_layer):
            first = len(parameters.specs)
            inner = scope.inner(f"blocks.{i}")
            shared = self.embedding.position, self.documents, self.x0, first_values
            self.blocks.append(Block(inner, *shared, i))
            self.specs_of_blocks.append(range(first, len(parameters.specs)))
        self.final_norm = build_norm(scope.inner("final_norm"), initial_gain(config))
        self.head = build_head(scope.inner("head"), self.embedding)
        self.softcap = SoftCap(scope.inner("softcap")) if config.logit_softcap else None
        self.use_recompute(RecomputePlan(enabled=False))

    def use_recompute(self, plan: RecomputePlan) -> None:
        """Divides the blocks into the segments of the plan."""
        ranges = plan.segments(len(self.blocks))
        self.segments = [
            Segment(self.workspace, self.blocks[range_.start : range_.stop], range_ == ranges[-1])
            for range_ in ranges
        ]

    @contextmanager
    def without_recompute(self) -> Iterator[None]:
        """Within the block, passes keep all activations."""
        segments = self.segments
        self.use_recompute(RecomputePlan(enabled=False))
        try:
            yield
        finally:
            self.segments = segments

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> logits (B T, V), rented; layers keep what backward needs."""
        return self._logits(self._hidden(ids))

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T), new tokens of the cache's sequences -> logits (B, V) of the last ones."""
        x = self._hidden(ids)
        if ids.shape[1] > 1:
            last = self.workspace.rent(len(ids), x.shape[1])
            last[...] = x.reshape(*ids.shape, -1)[:, -1]
            x = last
        return self._logits(x)

    def _hidden(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T) -> the residual stream after the last block (B T, C)."""
        self.workspace.direction, self.workspace.T = "forward", ids.shape[1]
        self.documents.find(ids)
        x = self.embedding.forward(ids)
        if self.x0:
            self.x0.keep(x, 0, x.shape[1])
        if self.workspace.training:
            self.inputs = [x]  # of the segments
            for segment in self.segments:
                x = segment.forward(x)
                self.inputs.append(x)
            return x
        kept = self.workspace.rented() - {id(x)}
        for block in self.blocks:
            x = block.forward(x)
            self.workspace.release_all_but(kept | {id(x)})
        return x

    def _logits(self, x: np.ndarray) -> np.ndarray:
        """x (R, C), the residual stream -> logits (R, V)."""
        self.normed = self.final_norm.forward(x)
        logits = self.head.forward(self.normed)
        return self.softcap.forward(logits) if self.softcap else logits

    def backward(self, dlogits: np.ndarray) -> None:
        """dlogits (B T, V), which is released -> adds to all gradients."""
        workspace, release = self.workspace, self.workspace.release
        workspace.direction = "backward"
        # forward: logits = softcap(head(norm(x)))
        if self.softcap:
            dlogits = self.softcap.backward(dlogits)
        dnormed = self.head.backward(dlogits)
        release(dlogits)
        dx = self.final_norm.backward(dnormed)
        release(dnormed, self.normed, self.inputs.pop())
        # forward: x = blocks(embedding(ids))
        for segment in reversed(self.segments):
            dx = segment.backward(dx)
            release(self.inputs.pop())
        if self.x0:
            self.x0.add_gradient(dx, 0)
        self.embedding.backward(dx)
        release(dx)


def declare_parameters(config: ModelConfig) -> Parameters:
    """The parameters of a model with this config. Allocates nothing."""
    parameters = Parameters()
    Network(Workspace(dry_run_backend(), np.float32, 0.0, 0), parameters, config)
    return parameters
