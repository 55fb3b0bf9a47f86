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
from smallmind.nn.head import Head, initial_gain
from smallmind.nn.layer import Norm, Scope
from smallmind.nn.layers import build
from smallmind.nn.parameters import Parameters
from smallmind.nn.recompute import RecomputePlan, Segment
from smallmind.nn.residuals import Carried
from smallmind.nn.workspace import Workspace
from smallmind.settings.config import Adapter, ModelConfig

Part = TypeVar("Part")


class Network:
    """head(norm(blocks(embedding(ids)))). Parameters are declared, not yet allocated.

    `forward` ends before the head, which computes some rows at a time, and `backward` begins there.
    """

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
        self.embedding: Embedding = declared("embedding", partial(build, "embedding"))
        self.x0 = Carried(workspace, "embedding_residual") if config.x0_scalars else None
        first_values = Carried(workspace, "first_values") if config.value_residual else None
        block = partial(
            build,
            "block",
            position=self.embedding.position,
            documents=self.documents,
            embedding=self.x0,
            first_values=first_values,
        )
        self.blocks: list[Block] = [
            declared(f"blocks.{i}", partial(block, layer=i)) for i in range(config.n_layer)
        ]
        gain = initial_gain(config)
        self.final_norm: Norm = declared("final_norm", lambda scope: build("norm", scope, gain))
        self.head = declared("head", partial(Head, embedding=self.embedding))
        self.use_recompute(RecomputePlan(enabled=False))

    def trains(self, part: str) -> bool:
        """Returns True if any parameter of a part is trained."""
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
        """Makes passes keep all activations within the block."""
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
        """ids, firsts (B, T) -> what the head makes logits of (N, C); keeps what backward needs.

        N is B T, with rows (N,) only these tokens: of others nothing is learned. In a pass that
        continues a cache it is the last token of each sequence.
        """
        workspace = self.workspace
        if not workspace.cache:
            self.parameters.in_rows()
        self.head.is_lowest = self.lowest == len(self.blocks) and not self.trains("final_norm")
        x, self.rows = self._stream(ids, firsts), rows
        if rows is not None:
            workspace.room = len(rows), len(x)
            self.learned = workspace.rent(len(rows), x.shape[1])
            workspace.kernels_for("head").take_rows(self.learned, x, rows)
            if not workspace.training:
                workspace.release(x)
            x = self.learned
        elif workspace.cache and ids.shape[1] > 1:
            last = workspace.rent(len(ids), x.shape[1])
            last[...] = x.reshape(*ids.shape, -1)[:, -1]
            x = last
        self.normed = self.final_norm.forward(x)
        return self.normed

    def _stream(self, ids: np.ndarray, firsts: np.ndarray | None) -> np.ndarray:
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

    def backward(self, dy: np.ndarray | None) -> None:
        """dy (N, C), released -> adds to gradients; None if only the head is trained."""
        workspace, release = self.workspace, self.workspace.release
        if dy is None:
            release(self.normed, self.inputs.pop())
            if self.rows is not None:
                release(self.learned)
            return
        # forward: normed = norm(x)
        dx = self.final_norm.backward(dy)
        x = self.inputs.pop()
        release(dy, self.normed)
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
    """Returns the parameters of a model with this config, and of its adapter. Allocates nothing."""
    parameters = Parameters()
    Network(Workspace(dry_run_backend(), np.float32, 0.0, 0), parameters, config, adapter)
    return parameters
