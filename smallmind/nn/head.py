"""The residual stream -> logits, with a separate matrix or the token embedding."""

import math

import numpy as np

from smallmind.nn.embedding import Embedding
from smallmind.nn.layer import Layer, Scope
from smallmind.nn.linear import INITIAL_DEVIATION, Linear
from smallmind.nn.parameters import Role
from smallmind.settings.config import ModelConfig


class TiedHead(Layer):
    """logits = x token_embedding^T (Press & Wolf 2017). Declares no parameters of its own."""

    def __init__(self, scope: Scope, embedding: Embedding) -> None:
        super().__init__(scope)
        self.token = embedding.token

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> logits (R, V), never rounded to 16 bits; keeps x."""
        self.x, token = x, self.token.compute
        logits = self.workspace.rent_full_precision(len(x), len(token))
        self.kernels.matmul_transpose_b(logits, x, token)
        return logits

    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, V) -> dx (R, C); adds to the gradient of the token embedding."""
        # forward: logits = x token_embedding^T
        dx, kernels, token = self.workspace.rent(*self.x.shape), self.kernels, self.token
        kernels.matmul(dx, dy, token.compute)
        kernels.matmul_transpose_a(token.grad, dy, self.x, token.grad)
        return dx


class UntiedHead(Linear):
    """logits = x weight; no bias even if the model has biases."""

    def __init__(self, scope: Scope) -> None:
        shape = scope.config.n_embd, scope.config.vocab_size
        super().__init__(scope, shape, role=Role.HEAD, bias=False)

    def forward(self, x: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """x (R, C) -> logits (R, V) [+ addend], never rounded to 16 bits; keeps x."""
        return self.multiply(self.workspace.rent_full_precision(len(x), self.shape[1]), x, addend)


Head = TiedHead | UntiedHead


def initial_gain(config: ModelConfig) -> float:
    """The gain with which the norm before the head starts, at most 1.

    As long as projections are zero, the residual stream is the embedding, and a tied head gives
    each token itself a logit of gain 0.02 C: at 512 channels the loss starts at 10 nats. A logit of
    ln(1 + V / 5) raises it by at most ln 1.2 above the ln V of a model that knows nothing.
    """
    if not (config.zero_init and config.tie_weights):
        return 1.0
    return min(1.0, math.log(1 + config.vocab_size / 5) / (INITIAL_DEVIATION * config.n_embd))
