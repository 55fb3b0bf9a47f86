"""Solutions of "A language model in 100 lines"."""

import numpy as np


# %% Exercise 1
def pair_loss(tokens, V):
    """tokens (n,), below V -> the mean loss of tokens[1:], each predicted from the one before."""
    before, after = tokens[:-1], tokens[1:]
    counts = np.zeros((V, V))
    np.add.at(counts, (before, after), 1)
    # A token that nothing follows has a row of zeros, which is never looked up.
    p = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    return -np.log(p[before, after]).mean()


# %% Exercise 2
def probabilities(logits, temperature):
    """logits (V,), temperature at least 0 -> the probability of each token (V,)."""
    if temperature == 0:  # the limit: everything on the largest
        return (np.arange(len(logits)) == logits.argmax()).astype(float)
    # The largest is subtracted before the division, so that exp gets no number above 0.
    p = np.exp((logits - logits.max()) / temperature)
    return p / p.sum()
