"""Solutions of "The recipe"."""

import numpy as np


# %% Exercise 1
def rate_of(step, steps, peak, warmup):
    """step from 0 to steps - 1 -> its rate."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)  # not 0 at step 0, and peak only at step `warmup`
    return peak * (steps - step) / (steps - warmup)


# %% Exercise 2
def orthogonalise(G, iterations):
    """G (M, N) -> U Vᵀ of its singular value decomposition, if there are enough iterations."""
    X = G / np.linalg.norm(G)  # the root of the sum of all s²: at least the largest s
    for _ in range(iterations):
        X = 1.5 * X - 0.5 * X @ X.T @ X
    return X


# %% Exercise 3
def paired_difference(before, after):
    """Losses by seed (n,), (n,) -> mean of after - before, its standard error."""
    differences = after - before
    return differences.mean(), differences.std(ddof=1) / np.sqrt(len(differences))
