"""The residual stream -> logits, with the token embedding as matrix."""

import math

import numpy as np

from smallmind.nn.embedding import Embedding
from smallmind.nn.layer import Layer, Scope
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.settings.config import ModelConfig


class TiedHead(Layer):
    """logits = x token_embedding^T (Press & Wolf 2017). Declares no parameters of its own."""

    def __init__(self, scope: Scope, embedding: Embedding) -> None:
        super().__init__(scope)
        self.token = embedding.token

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> logits (R, V), never rounded to 16 bits; keeps x."""
        self.x, token = x, self.token.matrix
        logits = self.workspace.rent_full_precision(len(x), len(token.values))
        token.multiply_transposed(self.kernels, logits, x, self.workspace.by_rows)
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


def initial_gain(config: ModelConfig) -> float:
    """The gain with which the norm before the head starts, at most 1.

    As long as projections are zero, the residual stream is the embedding, and a tied head gives
    each token itself a logit of gain 0.02 C: at 512 channels the loss starts at 10 nats. A logit of
    ln(1 + V / 5) raises it by at most ln 1.2 above the ln V of a model that knows nothing.
    """
    if not (config.zero_init and config.tie_weights):
        return 1.0
    return min(1.0, math.log(1 + config.vocab_size / 5) / (INITIAL_DEVIATION * config.n_embd))
