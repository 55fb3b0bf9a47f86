"""Solutions of "A block, a model"."""

import numpy as np

from smallmind.nn.layer import Layer
from smallmind.nn.parameters import ONES, Role


# %% Exercise 1
def llama_block_keeps(C, H, G, W):
    """-> the numbers per token that a block of Llama keeps, its input included."""
    norm = C + 1  # its input and a scale
    attention = C + C + 2 * G * (C // H) + C + H  # its input, q, k and v, its output, H sums
    return norm + attention + norm + C + 2 * W  # and the second product's input, two preactivations


# %% Exercise 2
def best_segment(N, K, X):
    """Blocks, numbers that a block keeps, numbers of its input -> the best k, from 1 to N."""
    # The formula has a real number for k, and neither rounds nor knows that N / k is rounded up.
    # `min` takes the first of several: the smallest.
    return min(range(1, N + 1), key=lambda k: (-(-N // k) - 1) * X + k * K)


# %% Exercise 3
class Scale(Layer):
    """y = x gain."""

    def __init__(self, scope):
        super().__init__(scope)
        self.gain = scope.declare("gain", (scope.config.n_embd,), ONES, Role.GAIN)

    def forward(self, x):
        """x (R, C) -> y (R, C), rented; keeps x."""
        self.x = x
        y = self.workspace.rent(*x.shape)
        np.multiply(x, self.gain.compute, out=y)
        return y

    def backward(self, dy):
        """dy (R, C) -> dx (R, C), rented; adds to the gradient of gain."""
        # forward: y = x gain
        dx = self.workspace.rent(*dy.shape)
        np.multiply(dy, self.gain.compute, out=dx)
        self.gain.grad += (dy * self.x).sum(axis=0)
        return dx


# %% Exercise 4
def accumulate(model, ids, targets, sizes):
    """ids, targets (B, T), sizes that sum to B -> the mean loss; adds to the gradients."""
    B, begin, total = len(ids), 0, 0.0
    for size in sizes:
        part, share = slice(begin, begin + size), size / B
        total += share * model.loss_and_gradients(ids[part], targets[part], scale=share)
        begin += size
    return total
