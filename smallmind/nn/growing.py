"""The parameters of a model with more tokens than before."""

from collections.abc import Mapping

import numpy as np


def grown(
    parameters: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Parameters by name -> the same in these shapes.

    Whatever there is for each token is kept, and a new token has the mean of all others: it is
    neither more nor less likely than they are, and the rest of the model knows what to do with it
    (Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Rows drawn around the
    mean were learned sooner in the first 30 steps on conversations, and no better after 150.
    """
    made = {}
    for name, value in parameters.items():
        shape = shapes[name]
        differing = [axis for axis in range(value.ndim) if shape[axis] != value.shape[axis]]
        for axis in differing:
            missing = shape[axis] - value.shape[axis]
            mean = value.mean(axis=axis, keepdims=True, dtype=np.float64).astype(value.dtype)
            value = np.concatenate([value, mean.repeat(missing, axis=axis)], axis=axis)
        made[name] = value
    return made
