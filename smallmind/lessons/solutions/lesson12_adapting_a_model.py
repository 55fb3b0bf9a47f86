"""Solutions of "Adapting a model"."""

import numpy as np


# %% Exercise 1
def add_adapters(W, adapters):
    """W (in, out), [(A, B, s), ...] -> (in, out)."""
    total = W.copy()
    for A, B, s in adapters:
        total += s * A @ B
    return total


# %% Exercise 2
def best_adapter(D, r):
    """D (in, out), r -> A (in, r), B (r, out)."""
    U, s, Vt = np.linalg.svd(D, full_matrices=False)
    # The singular values may be on either side. A root on each makes both about as large.
    root = np.sqrt(s[:r])
    return U[:, :r] * root, root[:, None] * Vt[:r]


# %% Exercise 3
def largest_rank(shapes, most):
    """[(in, out), ...], a number of parameters -> the rank."""
    return most // sum(n + m for n, m in shapes)
