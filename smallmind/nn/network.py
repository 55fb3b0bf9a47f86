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

# Logits that may be in memory at once. Of more, the head computes some rows at a time, forward and
# backward: those of 2048 tokens over a vocabulary of 150,000 would take 1.2 GB.
MOST_LOGITS = 2**24
ROW_STEP = 16  # such blocks of rows are a multiple of it, which products divide evenly


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
        self.V = config.vocab_size
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
        self.forward_hidden(ids, firsts, rows, is_whole=True)
        return self._logits_of(self.normed)

    def forward_hidden(
        self,
        ids: np.ndarray,
        firsts: np.ndarray | None = None,
        rows: np.ndarray | None = None,
        is_whole: bool = False,
    ) -> None:
        """As `forward`, but up to the head, which then computes each of `row_blocks` by itself.

        If it is whole, that is one.
        """
        x, self.rows = self._hidden(ids, firsts), rows
        is_whole = is_whole or len(x) * self.V <= MOST_LOGITS
        self.step = None if is_whole else _block_rows(self.V)
        if rows is not None:
            self.workspace.room = len(rows), len(x)
            self.learned = self.workspace.rent(len(rows), x.shape[1])
            self.workspace.kernels_for("head").take_rows(self.learned, x, rows)
            x = self.learned
        self.normed = self.final_norm.forward(x)
        self.dnormed: np.ndarray | None = None

    @property
    def row_blocks(self) -> list[slice]:
        """The rows whose logits are in memory at a time: all, unless they are too many."""
        N = len(self.normed)
        step = self.step or N
        return [slice(first, min(first + step, N)) for first in range(0, N, step)]

    def head_forward(self, block: slice) -> np.ndarray:
        """-> the logits of a block of rows (n, V), rented."""
        self.workspace.direction = "forward"
        if self.step is None:
            return self._logits_of(self.normed)
        with self._room_of(block):
            return self._logits_of(self.normed[block])

    def head_backward(self, dlogits: np.ndarray, block: slice) -> None:
        """dlogits, like `head_forward`'s logits, is released -> adds to the head's gradient.

        Keeps the gradient of the head's input.
        """
        workspace = self.workspace
        workspace.direction = "backward"
        # forward: logits = softcap(head(normed))
        if self.softcap:
            dlogits = self.softcap.backward(dlogits)
        if self._trains_head_only:
            normed = self.normed if self.step is None else self.normed[block]
            self.head.backward_weight(normed, dlogits)
        elif self.step is None:
            self.dnormed = self.head.backward(dlogits)
        else:
            if self.dnormed is None:
                self.dnormed = workspace.rent(*self.normed.shape)
            with self._room_of(block):
                dx = self.head.backward(dlogits)
            workspace.kernels_for("head").copy_columns(self.dnormed[block], dx, 0)
            workspace.release(dx)
        workspace.release(dlogits)

    @contextmanager
    def _room_of(self, block: slice) -> Iterator[None]:
        """Within it, arrays of a block's rows are rented with room for those of the largest."""
        workspace, before = self.workspace, self.workspace.room
        assert self.step is not None
        workspace.room = block.stop - block.start, self.step
        try:
            yield
        finally:
            workspace.room = before

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
        return self._logits_of(self.final_norm.forward(x))

    def _logits_of(self, normed: np.ndarray) -> np.ndarray:
        """normed (R, C) -> logits (R, V)."""
        logits = self.head.forward(normed)
        return self.softcap.forward(logits) if self.softcap else logits

    @property
    def _trains_head_only(self) -> bool:
        return self.lowest == len(self.blocks) and not self.trains("final_norm")

    def backward(self, dlogits: np.ndarray) -> None:
        """dlogits, like forward's logits, is released -> adds to gradients of all parameters."""
        self.head_backward(dlogits, slice(0, len(dlogits)))
        self.backward_hidden()

    def backward_hidden(self) -> None:
        """Adds to gradients of all parameters but the head's, after all `row_blocks`."""
        workspace, release = self.workspace, self.workspace.release
        dnormed = self.dnormed
        if dnormed is None:  # only the head is trained
            release(self.normed, self.inputs.pop())
            if self.rows is not None:
                release(self.learned)
            return
        # forward: normed = norm(x)
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


def _block_rows(V: int) -> int:
    """The rows of V logits that the head computes at a time."""
    most = MOST_LOGITS // V
    return max(1, most - most % ROW_STEP if most > ROW_STEP else most)


def declare_parameters(config: ModelConfig, adapter: Adapter | None = None) -> Parameters:
    """The parameters of a model with this config, and of its adapter. Allocates nothing."""
    parameters = Parameters()
    Network(Workspace(dry_run_backend(), np.float32, 0.0, 0), parameters, config, adapter)
    return parameters
