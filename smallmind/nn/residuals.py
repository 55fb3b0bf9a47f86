"""Residual connections from the start of the network: the embedding, the first block's values."""

import numpy as np

from smallmind.nn.layer import Layer, Scope
from smallmind.nn.parameters import Constant, Role
from smallmind.nn.workspace import Workspace

_BOTH = np.ones(2, np.float32)  # the weights of a plain sum


class Carried:
    """An activation at the start of the network, which later layers mix in.

    It and the sum of the gradients that they return stay until the end of the pass.
    """

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.workspace = workspace
        self.name = name

    def keep(self, x: np.ndarray, first: int, columns: int) -> None:
        """x (R, W) -> keeps a copy of these columns, unless this pass has one already."""
        carried = self.workspace.carried
        if self.name not in carried:  # else it is being recomputed, with the same result
            carried[self.name] = self.workspace.rent(len(x), columns)
            kernels = self.workspace.kernels_for(self.name)
            kernels.copy_columns(carried[self.name], x, first)

    @property
    def value(self) -> np.ndarray:
        """The kept values (R, N)."""
        return self.workspace.carried[self.name]

    @property
    def gradient(self) -> np.ndarray:
        """The sum (R, N) of the layers' gradients; zeros at first, never in 16 bits."""
        carried, name = self.workspace.carried, f"gradient of {self.name}"
        if name not in carried:
            carried[name] = self.workspace.rent_full_precision(*self.value.shape)
            self.workspace.kernels.clear(carried[name])  # for the layer that adds to it
        return carried[name]

    def add_gradient(self, dx: np.ndarray, first: int) -> None:
        """dx (R, W) -> the same with the sum of all gradients added to these columns. Writes dx."""
        # forward: value = x[:, first : first + N]
        part = self.workspace.rent(*self.value.shape)
        kernels = self.workspace.kernels_for(self.name)
        kernels.copy_columns(part, dx, first)
        kernels.mix(dx, part, self.gradient, _BOTH, first)
        self.workspace.release(part)


class EmbeddingResidual(Layer, only_kernels=True):
    """y = a x + b x0, where x0 is the embedding; a starts at 1 and b at 0 (modded-nanogpt)."""

    def __init__(self, scope: Scope, carried: Carried) -> None:
        super().__init__(scope)
        self.carried = carried
        self.weights = scope.declare("weight", (2,), Constant((1.0, 0.0)), Role.SCALAR)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> y (R, C); keeps x."""
        self.x = x
        y = self.workspace.rent(*x.shape)
        self.kernels.mix(y, x, self.carried.value, self.weights.compute)
        return y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, C), in place; adds to gradients."""
        # forward: y = a x + b x0
        kernels, carried, weights = self.kernels, self.carried, self.weights
        dother, dweights = carried.gradient, self.gradient(weights)
        kernels.mix_backward(dy, dother, dweights, self.x, carried.value, weights.compute)
        return dy


class ValueResidual(Layer, only_kernels=True):
    """v = a v + b v0, where v0 are the first block's values (Zhou et al. 2024).

    a and b start at 1/2. The values are the columns from `first` on of a matrix that has others
    too. The first block only keeps its own.
    """

    def __init__(self, scope: Scope, carried: Carried, first: int, is_first_block: bool) -> None:
        super().__init__(scope)
        self.carried = carried
        self.first = first
        self.columns = scope.config.kv_heads * scope.config.head_channels
        self.mixes = not is_first_block
        if self.mixes:
            self.weights = scope.declare("weight", (2,), Constant(0.5), Role.SCALAR)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, W) -> the same with its values mixed, in place; keeps them as they were."""
        if not self.mixes:
            self.carried.keep(x, self.first, self.columns)
            return x
        self.kept = self.workspace.rent(len(x), self.columns)
        kernels = self.kernels
        kernels.copy_columns(self.kept, x, self.first)
        kernels.mix(x, self.kept, self.carried.value, self.weights.compute, self.first)
        return x

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, W), the gradient of the mixed values -> that of the values, in place."""
        # forward: v = a v + b v0
        carried = self.carried
        if not self.mixes:
            carried.add_gradient(dy, self.first)
            return dy
        kernels, weights = self.kernels, self.weights
        v, v0, dv0, dweights = self.kept, carried.value, carried.gradient, self.gradient(weights)
        kernels.mix_backward(dy, dv0, dweights, v, v0, weights.compute, self.first)
        self.workspace.release(self.kept)
        return dy
