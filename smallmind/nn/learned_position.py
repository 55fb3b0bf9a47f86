"""A learned position embedding (Radford et al. 2019)."""

from typing import Any

import numpy as np

from smallmind.nn.documents import POSITIONS
from smallmind.nn.layer import Scope
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.nn.parameters import Normal, Parameter, Role
from smallmind.nn.position import Position


class LearnedPosition(Position, only_kernels=True, page="learned"):
    """x[t] = token[ids[t]] + weight[t], with a row per position (block_size, C)."""

    limits_context = True

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        shape, normal = (scope.config.block_size, scope.config.n_embd), Normal(INITIAL_DEVIATION)
        scope = scope._replace(name="position_embedding")
        self.weight = scope.declare("weight", shape, normal, Role.EMBEDDING, quantises=False)

    def embed(self, kernels: Any, x: np.ndarray, ids: np.ndarray, token: Parameter) -> None:
        """ids (B, T) -> x (B T, C), the rows of the tokens and of their positions. Writes x."""
        if (positions := self.workspace.carried.get(POSITIONS)) is not None:
            kernels.embedding(x, token.compute, ids, in_groups=token.matrix.in_groups)
            kernels.embedding(x, self.weight.compute, positions, x)
            return
        starts, in_groups = self.workspace.starts, token.matrix.in_groups
        kernels.embedding(x, token.compute, ids, self.weight.compute, starts, in_groups)

    def embed_backward(
        self, kernels: Any, dx: np.ndarray, ids: np.ndarray, token: Parameter
    ) -> None:
        """dx (B T, C) -> adds to the gradients of the tokens and of the positions."""
        if (positions := self.workspace.carried.get(POSITIONS)) is not None:
            # forward: x = token[ids] + weight[positions]
            kernels.embedding_backward(token.grad, None, dx, ids)
            kernels.embedding_backward(self.weight.grad, None, dx, positions)
            return
        # forward: x = token[ids] + weight
        kernels.embedding_backward(token.grad, self.weight.grad[: ids.shape[1]], dx, ids)
