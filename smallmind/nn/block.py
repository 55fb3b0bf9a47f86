"""One transformer block: norms, attention and a perceptron around the residual stream."""

from typing import Any

import numpy as np

from smallmind.nn.documents import Documents
from smallmind.nn.layer import Branch, Layer, Norm, Scope
from smallmind.nn.layers import build
from smallmind.nn.position import Position
from smallmind.nn.residuals import Carried, EmbeddingResidual


class Block(Layer, only_kernels=True, page="prenorm"):
    """[x = a x + b embedding;] x = x + attention(norm(x)); x = x + mlp(norm(x)).

    Norms come first (Radford et al. 2019). Attention stays inside `documents`. `embedding` and
    `first_values` are what it mixes in from the start of the network, if anything.
    """

    def __init__(
        self,
        scope: Scope,
        position: Position,
        documents: Documents,
        embedding: Carried | None,
        first_values: Carried | None,
        layer: int,
    ) -> None:
        super().__init__(scope)
        self.residual = (
            EmbeddingResidual(scope.inner("embedding_residual"), embedding) if embedding else None
        )
        self.attention_norm: Norm = build("norm", scope.inner("attention_norm"))
        inner = scope.inner("attention").adapted("attention")
        self.attention: Branch = build(
            "attention", inner, position.in_block(layer), documents, first_values, layer
        )
        self.mlp_norm: Norm = build("norm", scope.inner("mlp_norm"))
        self.mlp: Branch = build("mlp", scope.inner("mlp").adapted("mlp"))

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (B T, C) -> y (B T, C)."""
        self._attend(x)
        return self.mlp.forward(self.normed_middle, addend=self.middle)

    def recompute(self, x: np.ndarray) -> None:
        """x (B T, C), as in forward; keeps what forward keeps, but does not compute y."""
        self._attend(x)
        self.mlp.recompute(self.normed_middle)

    def _attend(self, x: np.ndarray) -> None:
        """x (B T, C) -> keeps what the MLP takes and what it adds to."""
        if self.residual:
            x = self.mixture = self.residual.forward(x)
        self.normed = self.attention_norm.forward(x)
        self.middle = self.attention.forward(self.normed, addend=x)
        self.normed_middle = self.mlp_norm.forward(self.middle)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C), in place."""
        release = self.workspace.release
        # forward: y = middle + mlp(norm(middle))
        dnormed = self.mlp.backward(dy)
        dmiddle = self.mlp_norm.backward(dnormed, addend=dy)
        release(dnormed, self.normed_middle, self.middle)
        # forward: middle = x + attention(norm(x))
        dnormed = self.attention.backward(dmiddle)
        dx = self.attention_norm.backward(dnormed, addend=dmiddle)
        release(dnormed, self.normed)
        # forward: x = a x + b embedding
        if self.residual:
            dx = self.residual.backward(dx)
            release(self.mixture)
        return dx


class SandwichBlock(Block, only_kernels=True, page="sandwich"):
    """[x = a x + b embedding;] x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x))).

    Each branch has a norm at its end too (Ding et al. 2021).
    """

    def __init__(self, scope: Scope, *shared: Any, **named: Any) -> None:
        super().__init__(scope, *shared, **named)
        self.attention_post_norm: Norm = build("norm", scope.inner("attention_post_norm"))
        self.mlp_post_norm: Norm = build("norm", scope.inner("mlp_post_norm"))

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (B T, C) -> y (B T, C)."""
        self._attend(x)
        self.hidden = self.mlp.forward(self.normed_middle)
        return self._added(self.mlp_post_norm.forward(self.hidden), self.middle)

    def recompute(self, x: np.ndarray) -> None:
        """x (B T, C), as in forward; keeps what forward keeps."""
        self.workspace.release(self.forward(x))

    def _attend(self, x: np.ndarray) -> None:
        """x (B T, C) -> keeps what the MLP takes and what it adds to."""
        if self.residual:
            x = self.mixture = self.residual.forward(x)
        self.normed = self.attention_norm.forward(x)
        self.attended = self.attention.forward(self.normed)
        self.middle = self._added(self.attention_post_norm.forward(self.attended), x)
        self.normed_middle = self.mlp_norm.forward(self.middle)

    def _added(self, branch: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Returns branch + x (R, C), in place of branch."""
        sum_ = branch.reshape(-1)
        self.kernels.add_vectors(sum_, sum_, x.reshape(-1))
        return branch

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C), in place."""
        release = self.workspace.release
        # forward: y = middle + norm(hidden), hidden = mlp(norm(middle))
        dhidden = self.mlp_post_norm.backward(dy)
        dnormed = self.mlp.backward(dhidden)
        dmiddle = self.mlp_norm.backward(dnormed, addend=dy)
        release(dhidden, self.hidden, dnormed, self.normed_middle, self.middle)
        # forward: middle = x + norm(attended), attended = attention(norm(x))
        dattended = self.attention_post_norm.backward(dmiddle)
        dnormed = self.attention.backward(dattended)
        dx = self.attention_norm.backward(dnormed, addend=dmiddle)
        release(dattended, self.attended, dnormed, self.normed)
        # forward: x = a x + b embedding
        if self.residual:
            dx = self.residual.backward(dx)
            release(self.mixture)
        return dx


class ParallelBlock(Block, only_kernels=True, page="parallel"):
    """[x = a x + b embedding;] x = x + attention(norm(x)) + mlp(norm(x)), with two norms of x.

    See Wang & Komatsuzaki (2021). The setting `parallel_residual` of GPT-NeoX may turn that off.
    """

    def __init__(self, scope: Scope, *shared: Any, **named: Any) -> None:
        super().__init__(scope, *shared, **named)
        self.is_parallel = scope.config.part_setting("parallel_residual")

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (B T, C) -> y (B T, C)."""
        if not self.is_parallel:
            return super().forward(x)
        x = self._norm(x)
        middle = self.attention.forward(self.normed, addend=x)
        y = self.mlp.forward(self.normed_middle, addend=middle)
        self.workspace.release(middle)
        return y

    def recompute(self, x: np.ndarray) -> None:
        """x (B T, C), as in forward; keeps what forward keeps, but does not compute y."""
        if not self.is_parallel:
            return super().recompute(x)
        self._norm(x)
        self.attention.recompute(self.normed)
        return self.mlp.recompute(self.normed_middle)

    def _norm(self, x: np.ndarray) -> np.ndarray:
        """x (B T, C) -> x with its embedding mixed in; keeps what both branches take."""
        if self.residual:
            x = self.mixture = self.residual.forward(x)
        self.normed, self.normed_middle = self.attention_norm.forward(x), self.mlp_norm.forward(x)
        return x

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (B T, C) -> dx (B T, C), in place."""
        if not self.is_parallel:
            return super().backward(dy)
        release = self.workspace.release
        # forward: y = x + attention(norm(x)) + mlp(norm(x))
        dnormed = self.mlp.backward(dy)
        dattended = self.attention.backward(dy)
        dx = self.mlp_norm.backward(dnormed, addend=dy)
        dx = self.attention_norm.backward(dattended, addend=dx)
        release(dnormed, self.normed_middle, dattended, self.normed)
        # forward: x = a x + b embedding
        if self.residual:
            dx = self.residual.backward(dx)
            release(self.mixture)
        return dx
