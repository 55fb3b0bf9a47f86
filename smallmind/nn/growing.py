"""The parameters of a model with more tokens than before."""

import numpy as np


def grown(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter -> the same in this shape, of which no side is shorter.

    Whatever there is for each token is kept, and a new token has the mean of all others: it is
    neither more nor less likely than they are, and the rest of the model knows what to do with it
    (Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Rows drawn around the
    mean were learned sooner in the first 30 steps on conversations, and no better after 150.
    """
    for axis in range(value.ndim):
        if missing := shape[axis] - value.shape[axis]:
            mean = value.mean(axis=axis, keepdims=True, dtype=np.float64).astype(value.dtype)
            value = np.concatenate([value, mean.repeat(missing, axis=axis)], axis=axis)
    return value
