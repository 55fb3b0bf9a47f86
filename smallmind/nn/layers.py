"""Which layers a model is made of: the config names a kind, and `parts` says where it is.

Each function takes the scope of the layer.
"""

from typing import Protocol

import numpy as np

from smallmind import parts
from smallmind.nn.embedding import Embedding
from smallmind.nn.head import Head, TiedHead, UntiedHead
from smallmind.nn.scope import Scope


class Norm(Protocol):
    """Normalises each row of the residual stream."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> y (R, C); keeps what backward needs, x included."""

    def backward(self, dy: np.ndarray, dx: np.ndarray, residual: np.ndarray | None) -> None:
        """dy (R, C) -> dx (R, C) [+ residual]. Writes dx, adds to gradients, releases x."""


class Perceptron(Protocol):
    """Mixes the channels of each token."""

    def forward(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """x, residual (R, C) -> residual + mlp(x) (R, C); keeps what backward needs."""

    def recompute(self, x: np.ndarray) -> None:
        """x (R, C); keeps what forward keeps, without computing its result."""

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, C); adds to gradients."""


def build_embedding(scope: Scope) -> Embedding:
    """Tokens and their positions -> the residual stream."""
    embedding: Embedding = parts.load(parts.POSITIONS, scope.config.position)(scope)
    return embedding


def build_norm(scope: Scope, gain: float = 1.0) -> Norm:
    """The norm before attention, MLP and head. All its gains start at `gain`."""
    norm: Norm = parts.load(parts.NORMS, scope.config.norm)(scope, gain)
    return norm


def build_mlp(scope: Scope) -> Perceptron:
    """What mixes the channels of a token."""
    mlp: Perceptron = parts.load(parts.MLPS, scope.config.mlp)(scope)
    return mlp


def build_head(scope: Scope, embedding: Embedding) -> Head:
    """The residual stream -> logits."""
    return TiedHead(scope, embedding) if scope.config.tie_weights else UntiedHead(scope)
