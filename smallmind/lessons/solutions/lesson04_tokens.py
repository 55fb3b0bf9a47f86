"""Solutions of "Tokens"."""

import itertools
import math
from collections import Counter


# %% Exercise 1
def best_pair(words):
    """{a word, as a tuple of bytes: its count} -> a pair of bytes."""
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    for word, times in words.items():
        for pair in itertools.pairwise(word):
            pairs[pair] += times
    return min(pairs, key=lambda pair: (-pairs[pair], pair))


# %% Exercise 2
def encode_by_rank(word, ranks):
    """A word as text, {pair: its place} -> its tokens, as a tuple of bytes objects."""
    tokens = tuple(bytes([b]) for b in word.encode())
    while learned := [pair for pair in itertools.pairwise(tokens) if pair in ranks]:
        tokens = merge(tokens, min(learned, key=ranks.__getitem__))
    return tokens


# %% Exercise 3
def bits_per_byte(losses, text):
    """losses (n,) in nats, one for each token of a text -> bits per byte."""
    return losses.sum() / math.log(2) / len(text.encode())
