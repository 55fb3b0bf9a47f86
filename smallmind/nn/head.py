"""The residual stream -> logits, some rows at a time where the vocabulary is large."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.nn.embedding import Embedding
from smallmind.nn.layer import Layer, Scope
from smallmind.nn.layers import build_linear
from smallmind.nn.linear import INITIAL_DEVIATION, Linear
from smallmind.nn.parameters import Role
from smallmind.nn.softcap import SoftCap
from smallmind.nn.workspace import Kernel
from smallmind.settings.config import ModelConfig

# Logits that may be in memory at once. Of more, the head computes some rows at a time, forward and
# backward: those of 2048 tokens over a vocabulary of 150,000 would take 1.2 GB.
MAX_LOGITS = 2**24
ROW_STEP = 16  # such blocks of rows are a multiple of it, which products divide evenly


class Head(Layer, only_kernels=True):
    """logits = softcap(x weight), weight (C, V), or the token embedding transposed; no bias.

    `blocks` divides the rows of a pass; for each block, `backward` follows `forward`.
    """

    def __init__(self, scope: Scope, embedding: Embedding) -> None:
        super().__init__(scope)
        config = scope.config
        self.V = config.vocab_size
        self.matrix = _matrix(scope, embedding)
        cap = scope._replace(name="softcap")
        self.softcap = SoftCap(cap) if config.logit_softcap else None
        self.is_lowest = False  # nothing below it is trained
        self.dx: Any = None

    def holds(self, rows: int) -> bool:
        """Returns True if the logits of so many rows may be in memory at once."""
        return rows * self.V <= MAX_LOGITS

    def blocks(self, x: np.ndarray) -> list[slice]:
        """x (N, C) -> the rows whose logits are in memory at a time: all, unless too many."""
        step = self._step(x) or len(x)
        return [slice(first, min(first + step, len(x))) for first in range(0, len(x), step)]

    def forward(self, x: np.ndarray, block: slice | None = None) -> np.ndarray:
        """x (N, C) -> the logits of all rows or of a block of them (n, V), rented; keeps x."""
        self.workspace.direction = "forward"
        self.x, self.block = x, block
        self.step = None if block is None else self._step(x)
        with self._largest_block():
            logits = self.matrix.forward(x if self.step is None else x[block])
            return self.softcap.forward(logits) if self.softcap else logits

    def backward(self, dlogits: np.ndarray) -> None:
        """dlogits (n, V), released -> adds to the gradient of weight; writes rows of `dx` (N, C).

        dx is rented with the first block, and None if nothing below the head is trained.
        """
        workspace, matrix, block = self.workspace, self.matrix, self.block
        workspace.direction = "backward"
        # forward: logits = softcap(x weight)
        if self.softcap:
            dlogits = self.softcap.backward(dlogits)
        if self.is_lowest:
            self.dx = None
            matrix.backward_weight(matrix.x, dlogits)
        elif self.step is None:
            self.dx = matrix.backward(dlogits)
        else:
            assert block is not None
            if block.start == 0:
                self.dx = workspace.rent(*self.x.shape)
            with self._largest_block():
                dx = matrix.backward(dlogits)
            self.kernels.copy_columns(self.dx[block], dx, 0)
            workspace.release(dx)
        workspace.release(dlogits)

    def losses(
        self,
        losses: np.ndarray,
        x: np.ndarray,
        targets: np.ndarray,
        weights: np.ndarray | None = None,
        kernel_of: Callable[[slice], Kernel] | None = None,
        correct: np.ndarray | None = None,
    ) -> None:
        """x (N, C), targets, weights (N,) -> losses (N,), correct (N,): the target is likeliest.

        Writes both. In passes of training also adds gradients, times the scale of the workspace,
        as `backward` does. Kernels of blocks of rows may replace cross_entropy.
        """
        workspace, profile = self.workspace, self.workspace.profile
        scale = workspace.scale if workspace.training else 1.0
        for block in self.blocks(x):
            with profile("Forward"):
                logits = self.forward(x, block)
            if correct is not None:
                correct[block] = logits.argmax(axis=1) == targets[block]
            with profile("Loss"):
                weighted = () if weights is None else (weights[block],)
                kernel = kernel_of and kernel_of(block)
                dlogits = self.cross_entropy(
                    losses[block], logits, targets[block], scale, *weighted, kernel=kernel
                )
            if workspace.training:
                with profile("Backward"):
                    self.backward(dlogits)
            else:
                workspace.release(dlogits)

    def cross_entropy(
        self,
        losses: np.ndarray,
        logits: np.ndarray,
        targets: np.ndarray,
        scale: float | np.ndarray = 1.0,
        *weights: np.ndarray,
        kernel: Kernel | None = None,
    ) -> np.ndarray:
        """logits (N, V), targets [weights] (N,) -> dlogits (N, V); writes losses (N,).

        dlogits overwrites logits or, if gradients have 16 bits, is rented and logits are released.
        Another kernel may replace that of the cross-entropy.
        """
        workspace = self.workspace
        in_place = workspace.activation_dtype is workspace.dtype
        dlogits = logits if in_place else workspace.rent(*logits.shape)
        kernels = workspace.kernels_for("loss")
        kernel = kernel or kernels.cross_entropy
        kernel(losses, dlogits, logits, targets, scale, *weights)
        if not in_place:
            workspace.release(logits)
        return dlogits

    def _step(self, x: np.ndarray) -> int | None:
        """-> the rows of the largest block; None if all logits of the pass may be in memory."""
        room = self.workspace.room
        rows = room[1] if room else len(x)
        if self.holds(rows):
            return None
        most = MAX_LOGITS // self.V
        return max(1, most - most % ROW_STEP if most > ROW_STEP else most)

    @contextmanager
    def _largest_block(self) -> Iterator[None]:
        """Rents arrays of a block's rows with room for those of the largest, within the block."""
        workspace, before = self.workspace, self.workspace.room
        if self.step is not None:
            assert self.block is not None
            workspace.room = self.block.stop - self.block.start, self.step
        try:
            yield
        finally:
            workspace.room = before


class TiedHead(Layer, only_kernels=True):
    """logits = x token_embedding^T (Press & Wolf 2017). Declares no parameters of its own."""

    def __init__(self, scope: Scope, embedding: Embedding) -> None:
        super().__init__(scope)
        self.token = embedding.token
        self.token.is_multiplied = True

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> logits (R, V), never rounded to 16 bits; keeps x."""
        self.x, token = x, self.token.matrix
        logits = self.workspace.rent_full_precision(len(x), len(token.values))
        by_rows = self.workspace.by_rows(token.has_blocks)
        token.multiply_transposed(self.kernels, logits, x, by_rows)
        return logits

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, V) -> dx (R, C); adds to the gradient of the token embedding."""
        # forward: logits = x token_embedding^T
        dx = self.workspace.rent(*self.x.shape)
        self.token.matrix.multiply(self.kernels, dx, dy)
        self.backward_weight(self.x, dy)
        return dx

    def backward_weight(self, x: np.ndarray, dy: np.ndarray) -> None:
        """x (R, C), as in forward, dy (R, V) -> adds to the gradient of the token embedding."""
        # forward: logits = x token_embedding^T
        if (gradient := self.token.grad) is not None:
            self.kernels.matmul_transpose_a(gradient, dy, x, gradient)


def _matrix(scope: Scope, embedding: Embedding) -> TiedHead | Linear:
    """Builds the matrix of the head, which has no bias even if the model has biases."""
    if scope.config.tie_weights:
        if scope.adapter and "head" in scope.adapter.on:
            raise InputError(
                "the head of this model shares the embedding's matrix: leave head out of lora_on"
            )
        return TiedHead(scope, embedding)
    shape = scope.config.n_embd, scope.config.vocab_size
    return build_linear(scope.adapted("head"), shape, role=Role.HEAD, bias=False)


def initial_gain(config: ModelConfig) -> float:
    """Returns the gain with which the norm before the head starts, at most 1.

    As long as projections are zero, the residual stream is the embedding, and a tied head gives
    each token itself a logit of gain 0.02 C: at 512 channels the loss starts at 10 nats. A logit of
    ln(1 + V / 5) raises it by at most ln 1.2 above the ln V of a model that knows nothing.
    """
    if not (config.zero_init and config.tie_weights):
        return 1.0
    return min(1.0, math.log(1 + config.vocab_size / 5) / (INITIAL_DEVIATION * config.n_embd))
