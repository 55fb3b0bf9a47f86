"""Solutions of "Backward by hand"."""

import numpy as np


# %% Exercise 1
def exercise_1(dy, xhat, rstd, weight):
    """dy (R, C) -> dx (R, C), dweight, dbias (C,)."""
    dxhat = dy * weight
    # Directly, through the mean, and through the variance.
    through_mean = dxhat.mean(axis=1, keepdims=True)
    through_variance = xhat * (dxhat * xhat).mean(axis=1, keepdims=True)
    dx = rstd * (dxhat - through_mean - through_variance)
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


# %% Exercise 2
def exercise_2(dx, weight, ids):
    """dx (B, T, C) -> dweight (V, C)."""
    dweight = np.zeros_like(weight)
    # `dweight[ids] += dx` would read each row once, and keep only the last of several sums.
    np.add.at(dweight, ids, dx)
    return dweight


# %% Exercise 3
def exercise_3(dloss, x, dlogits, weight, ids):
    """-> dweight (V, C)."""
    dweight = dlogits.T @ x  # its use as the head
    de = (dlogits @ weight) * (1 - x * x)  # through the tanh
    np.add.at(dweight, ids.reshape(-1), de)  # its use as the embedding
    return dloss * dweight


# %% Exercise 4
def exercise_4(dy, x, weight):
    """dy (R, C) -> dx (R, C), dweight (C,)."""
    # Two paths: directly, and through the root. Without a mean there is no third.
    r = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
    xhat, dxhat = x * r, dy * weight
    dx = r * (dxhat - xhat * (dxhat * xhat).mean(axis=1, keepdims=True))
    return dx, (dy * xhat).sum(axis=0)
