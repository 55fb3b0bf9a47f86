"""The perceptron of a block: C -> W hidden channels, an activation, W -> C."""

import numpy as np

from smallmind.nn.layer import Branch, Scope
from smallmind.nn.layers import build_linear
from smallmind.nn.projection import Projection


class MLP(Branch, only_kernels=True, page="gelu"):
    """y = projection(gelu(expansion(x))). Other activations are subclasses."""

    activation = "gelu"  # the name of its kernel
    inputs = 1  # columns of the expansion per hidden channel

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        C, W = scope.config.n_embd, scope.config.hidden_size
        self.width = W
        shape, widths = (C, self.inputs * W), (W,) * self.inputs
        self.expansion = build_linear(scope.inner("expansion"), shape, widths=widths)
        self.projection = Projection(scope.inner("projection"), W)

    def forward(self, x: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """x (R, C) -> y (R, C) [+ addend (R, C)]; keeps x and the preactivation."""
        activation = self.expand(x)
        y = self.projection.forward(activation, addend)
        self.workspace.release(activation)
        return y

    def expand(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> the activation (R, W); keeps x and the preactivation."""
        self.preactivation = self.workspace.rent(len(x), self.width)
        activation = self.workspace.rent(len(x), self.width)
        self.expansion.multiply(self.preactivation, x, activation=activation)
        return activation

    def recompute(self, x: np.ndarray) -> None:
        """x (R, C); keeps what forward keeps."""
        self.preactivation = self.expansion.forward(x)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, C); adds to gradients."""
        # forward: y = projection(activation)
        dactivation = self.projection.backward_input(dy)
        # forward: activation = gelu(preactivation)
        # In place: recomputes the activation into dactivation's buffer, and writes the gradient of
        # the preactivation over the preactivation.
        activation, dpreactivation = dactivation, self.preactivation
        backward = getattr(self.kernels, f"{self.activation}_backward")
        backward(dpreactivation, activation, dactivation, self.preactivation)
        self.projection.backward_weight(activation)
        self.workspace.release(activation)
        # forward: preactivation = expansion(x)
        dx = self.expansion.backward(dpreactivation)
        self.workspace.release(dpreactivation)
        return dx


class SquaredReLU(MLP, only_kernels=True, page="relu2"):
    """y = projection(max(expansion(x), 0)^2) (So et al. 2021)."""

    activation = "relu2"

    def expand(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> the activation (R, W); keeps x and the preactivation."""
        self.preactivation = self.expansion.forward(x)
        activation = self.workspace.rent(len(x), self.width)
        getattr(self.kernels, self.activation)(activation, self.preactivation)
        return activation


class ExactGELU(SquaredReLU, only_kernels=True, page="gelu_erf"):
    """y = projection(h Phi(h)), h = expansion(x); Phi is the normal distribution function."""

    activation = "gelu_erf"


class SwiGLU(SquaredReLU, only_kernels=True, page="swiglu"):
    """y = projection(silu(gate) up); the expansion gives both (Shazeer 2020)."""

    activation = "swiglu"
    inputs = 2


class GeGLU(SquaredReLU, only_kernels=True, page="geglu"):
    """y = projection(gelu(gate) up); the expansion gives both (Shazeer 2020)."""

    activation = "geglu"
    inputs = 2
