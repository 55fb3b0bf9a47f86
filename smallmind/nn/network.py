"""The layers of a model in order: embedding, blocks, final norm, head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

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
from smallmind.settings.config import Adapter, ModelConfig

Part = TypeVar("Part")


class Network:
    """Forward from ids to logits, and back. Parameters are declared, not yet allocated."""

    def __init__(
        self,
        workspace: Workspace,
        parameters: Parameters,
        config: ModelConfig,
        adapter: Adapter | None = None,
    ) -> None:
        scope = Scope(workspace, parameters, config, adapter=adapter)
        self.workspace, self.parameters = workspace, parameters
        self.parts: dict[str, range] = {}  # numbers of the parameters that each part declares

        def declared(name: str, build: Callable[[Scope], Part]) -> Part:
            first = len(parameters.specs)
            part = build(scope.inner(name))
            self.parts[name] = range(first, len(parameters.specs))
            return part

        self.documents = Documents(scope.inner("documents"))
        self.embedding = declared("embedding", Embedding)
        self.x0 = Carried(workspace, "embedding_residual") if config.x0_scalars else None
        first_values = Carried(workspace, "first_values") if config.value_residual else None
        block = partial(
            Block,
            position=self.embedding.position,
            documents=self.documents,
            embedding=self.x0,
            first_values=first_values,
        )
        self.blocks = [
            declared(f"blocks.{i}", partial(block, layer=i)) for i in range(config.n_layer)
        ]
        gain = initial_gain(config)
        self.final_norm = declared("final_norm", partial(build_norm, gain=gain))
        self.head = declared("head", partial(build_head, embedding=self.embedding))
        self.softcap = SoftCap(scope.inner("softcap")) if config.logit_softcap else None
        self.use_recompute(RecomputePlan(enabled=False))

    def trains(self, part: str) -> bool:
        """True if any parameter of a part is trained."""
        return any(self.parameters.specs[number].trainable for number in self.parts[part])

    @property
    def lowest(self) -> int:
        """The first block that a gradient has to reach; below it nothing is trained."""
        if self.trains("embedding"):
            return 0
        trained = (i for i in range(len(self.blocks)) if self.trains(f"blocks.{i}"))
        return next(trained, len(self.blocks))

    def use_recompute(self, plan: RecomputePlan) -> None:
        """Divides the blocks with a backward pass into the segments of the plan."""
        blocks = self.blocks[self.lowest :]
        ranges = plan.segments(len(blocks))
        self.segments = [
            Segment(self.workspace, blocks[range_.start : range_.stop], range_ == ranges[-1])
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

    def forward(
        self,
        ids: np.ndarray,
        firsts: np.ndarray | None = None,
        rows: np.ndarray | None = None,
    ) -> np.ndarray:
        """ids, firsts (B, T) -> logits (B T, V), rented; layers keep what backward needs.

        With rows (N,), only those of these tokens (N, V): of others nothing is learned.
        """
        x, self.rows = self._hidden(ids, firsts), rows
        if rows is None:
            return self._logits(x)
        self.workspace.room = len(rows), len(x)
        self.learned = self.workspace.rent(len(rows), x.shape[1])
        self.workspace.kernels_for("head").take_rows(self.learned, x, rows)
        return self._logits(self.learned)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """ids (B, T), new tokens of the cache's sequences -> logits (B, V) of the last ones."""
        x = self._hidden(ids)
        if ids.shape[1] > 1:
            last = self.workspace.rent(len(ids), x.shape[1])
            last[...] = x.reshape(*ids.shape, -1)[:, -1]
            x = last
        return self._logits(x)

    def _hidden(self, ids: np.ndarray, firsts: np.ndarray | None = None) -> np.ndarray:
        """ids, firsts (B, T) -> the residual stream after the last block (B T, C)."""
        self.workspace.direction, self.workspace.T = "forward", ids.shape[1]
        self.documents.find(ids, firsts)
        x = self.embedding.forward(ids)
        if self.x0:
            self.x0.keep(x, 0, x.shape[1])
        is_training = self.workspace.training
        kept = self.workspace.rented() - {id(x)}
        for block in self.blocks[: self.lowest] if is_training else self.blocks:
            x = block.forward(x)
            self.workspace.release_all_but(kept | {id(x)})
        if is_training:
            self.inputs = [x]  # of the segments
            for segment in self.segments:
                x = segment.forward(x)
                self.inputs.append(x)
        return x

    def _logits(self, x: np.ndarray) -> np.ndarray:
        """x (R, C), the residual stream -> logits (R, V)."""
        self.normed = self.final_norm.forward(x)
        logits = self.head.forward(self.normed)
        return self.softcap.forward(logits) if self.softcap else logits

    def backward(self, dlogits: np.ndarray) -> None:
        """dlogits, like forward's logits, is released -> adds to gradients of all parameters."""
        workspace, release = self.workspace, self.workspace.release
        workspace.direction = "backward"
        # forward: logits = softcap(head(norm(x)))
        if self.softcap:
            dlogits = self.softcap.backward(dlogits)
        if self.lowest == len(self.blocks) and not self.trains("final_norm"):
            self.head.backward_weight(self.normed, dlogits)  # nothing else is trained
            release(dlogits, self.normed, self.inputs.pop())
            if self.rows is not None:
                release(self.learned)
            return
        dnormed = self.head.backward(dlogits)
        release(dlogits)
        dx = self.final_norm.backward(dnormed)
        x = self.inputs.pop()
        release(dnormed, self.normed)
        if self.rows is not None:
            # forward: learned = x[rows]
            workspace.room = None
            dlearned, dx = dx, workspace.rent(*x.shape)
            kernels = workspace.kernels_for("head")
            kernels.clear(dx)
            kernels.put_rows(dx, dlearned, self.rows)
            release(dlearned, self.learned)
        release(x)
        # forward: x = blocks(embedding(ids))
        for segment in reversed(self.segments):
            dx = segment.backward(dx)
            release(self.inputs.pop())
        if self.trains("embedding"):
            if self.x0:
                self.x0.add_gradient(dx, 0)
            self.embedding.backward(dx)
        release(dx)


def declare_parameters(config: ModelConfig, adapter: Adapter | None = None) -> Parameters:
    """The parameters of a model with this config, and of its adapter. Allocates nothing."""
    parameters = Parameters()
    Network(Workspace(dry_run_backend(), np.float32, 0.0, 0), parameters, config, adapter)
    return parameters
